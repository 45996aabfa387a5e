"""Launch a fleet and do what the walks of ARCHITECTURE.md tell; `test_walks.py` notes what runs meanwhile.

Arguments: profile, model, and a file whose one byte says which walk is under way (0: none).
"""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from penstock import Fleet
from penstock.engine.partial import Partials
from penstock.fleet.member import State
from penstock.fleet.roster import Roster
from penstock.router.state import RouterState
from penstock.types import SamplingParams

REQUEST, UPDATE, DEATH, CUT = 1, 2, 3, 4


def note_from_now_on() -> None:
    """Not from their start: to note every call of vLLM's imports takes minutes."""
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGUSR2)


async def router_says(roster: Roster, what: Callable[[RouterState], bool]) -> None:
    while not what(await roster.admin.engines()):  # noqa: ASYNC110 - the router reports no change
        await asyncio.sleep(0.01)


async def no_connection(url: str) -> None:
    """Wait until this process has closed its idle connections to a server, and a moment for the server to notice."""
    port = urlsplit(url).port
    while any(each.raddr and each.raddr.port == port for each in psutil.Process().net_connections("tcp")):  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)


async def main(profile: str, model: str, marks: Path) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # inherited: a process that begins would die of it
    with marks.open("r+b") as file:
        mark = mmap.mmap(file.fileno(), 1)
    if profile == "sim":
        tensors = {"a": torch.ones(8)}
    else:
        from transformers import AutoModelForCausalLM

        tensors = dict(AutoModelForCausalLM.from_pretrained(model, dtype="float32").named_parameters())
    long = SamplingParams(max_tokens=1500, ignore_eos=True)  # seconds: they are in flight when their engine is killed
    # What goes on beside a walk is kept out of it: both intervals are longer than the whole program.
    quiet = {"health_interval_s": 600.0, "engine_metrics_interval_s": 0.0}
    async with Fleet.launch(model, engines=2, profile=profile, max_model_len=2048, **quiet) as fleet:
        roster = fleet._roster

        async def killed() -> None:
            process = roster.members[1].process
            assert process is not None
            # Not by `process.kill`, which reads the group's maps first: under a profile the requests ended meanwhile.
            os.killpg(process.pid, signal.SIGKILL)
            await roster.until(lambda: roster.members[1].state is not State.SERVING)

        await fleet.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams(max_tokens=8))  # all is awake
        note_from_now_on()
        mark[0] = REQUEST
        await fleet.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=SamplingParams(max_tokens=8))
        mark[0] = 0
        await router_says(roster, lambda state: not any(engine.outstanding for engine in state.engines))
        await no_connection(fleet.url)  # the end of idle connections is no part of a walk either
        mark[0] = UPDATE
        await fleet.update_weights(tensors.items())
        mark[0] = DEATH
        await killed()
        await roster.until(lambda: roster.members[1].state in {State.SYNCING, State.SERVING})
        note_from_now_on()
        await roster.until(lambda: roster.members[1].state is State.SERVING)
        await asyncio.sleep(0.2)  # the router is told a moment later
        mark[0] = 0
        await router_says(roster, lambda state: len(state.engines) == 2)
        mark[0] = CUT
        reported: set[int] = set()
        all_reported = asyncio.Event()
        add = Partials.add

        def note_report(partials: Partials, reports: Any) -> int:
            reported.add(id(partials))
            if len(reported) == 4:  # of them the router has given each engine some
                all_reported.set()
            return add(partials, reports)

        Partials.add = note_report  # type: ignore[method-assign]
        requests = [
            asyncio.create_task(fleet.generate(prompt_token_ids=[[5, 6, i]], sampling_params=long)) for i in range(4)
        ]
        await all_reported.wait()
        await killed()
        outputs = await asyncio.gather(*requests)
        mark[0] = 0
        assert [len(ids) for out in outputs for ids in out.response_ids] == [long.max_tokens] * 4
        assert fleet.counters.deaths, fleet.counters


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
