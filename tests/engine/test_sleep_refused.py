"""An engine that cannot give its memory back says so, where vLLM answers that it sleeps."""

from __future__ import annotations

import pytest

from penstock.engine.capabilities import require
from penstock.errors import MissingCapabilityError

pytestmark = pytest.mark.vllm


async def test_an_engine_that_frees_nothing_does_not_pretend_to_sleep(live) -> None:
    capabilities = (await live.engine.control.info()).capabilities
    with pytest.raises(MissingCapabilityError, match=r"lacks sleep mode; start it .*--enable-sleep-mode"):
        require([("live", capabilities)], "sleep", "sleep")
