"""An engine that cannot give its memory back says so, where vLLM answers that it sleeps."""

from __future__ import annotations

import pytest

from penstock.errors import MissingCapabilityError
from penstock.types import SamplingParams

pytestmark = pytest.mark.vllm


async def test_an_engine_that_frees_nothing_does_not_pretend_to_sleep(live) -> None:
    assert not (await live.engine.control.info()).capabilities.sleep
    with pytest.raises(MissingCapabilityError, match=r"lacks sleep mode; start it .*--enable-sleep-mode"):
        await live.engine.sleep(1)
    assert await live.engine.sample([5], 1, SamplingParams(max_tokens=1)), "nothing was changed"
