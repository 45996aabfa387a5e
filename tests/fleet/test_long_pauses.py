"""Pauses longer than the deadline of any call, in virtual time: text goes into ids and back all the same."""

from __future__ import annotations

import asyncio

from virtual_fleet import Network, VirtualEngines, open_fleet, virtual_time, without_sockets

from penstock.control_types import PauseMode
from penstock.sim.config import SimConfig


def test_text_waits_for_a_long_pause_on_its_way_in_and_out() -> None:
    async def main() -> None:
        network = Network(SimConfig(tokens_per_second=10))
        params = {"max_tokens": 8, "ignore_eos": True}
        with without_sockets(network):
            fleet = await open_fleet(network, VirtualEngines(network), 1)
            made = asyncio.create_task(fleet.generate(prompt_token_ids=[[1, 2]], sampling_params=params))
            await asyncio.sleep(0.1)
            await fleet.pause_generation(PauseMode.WAIT)
            asked = asyncio.create_task(fleet.generate(["ab"], params))
            await asyncio.sleep(600.0)
            assert not made.done(), "its tokens are there, and their text is asked for behind the gate"
            await fleet.resume_generation()
            for out in await asyncio.gather(made, asked):
                assert [len(ids) for ids in out.response_ids] == [8]
                assert all(out.responses)
            await fleet.teardown()

    with virtual_time() as runner:
        runner.run(main())
