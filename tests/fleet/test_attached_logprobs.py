"""A server with our plugin that a person started without processed logprobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_attach import PARAMS, QUICK, SIM, check_serves, server

from penstock import Fleet
from penstock.errors import MissingCapabilityError


async def test_who_holds_the_fleet_refuses_them_and_so_does_who_has_adopted_it() -> None:
    async with (
        server(logprobs_mode="raw_logprobs") as raw,
        Fleet.launch("any", engines=1, attach=[raw.url], **SIM, **QUICK) as fleet,
    ):
        async with Fleet.connect(fleet.url) as adopted:
            for one in (fleet, adopted):
                with pytest.raises(MissingCapabilityError, match=r"e1 lacks logprobs .* --logprobs-mode processed"):
                    await one.sample([1, 2], 2, PARAMS)
                samples = await one.sample([1, 2], 2, replace(PARAMS, logprobs=False))
                assert [len(sample.token_ids) for sample in samples] == [PARAMS.max_tokens] * 2
        await fleet.remove("e1")
        await check_serves(fleet, engines=1)
