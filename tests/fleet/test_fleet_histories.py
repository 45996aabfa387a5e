"""Invariant 2 over many histories: requests, pauses, resumes, updates and aborts in any order and at any moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from patience import WAIT_S
from penstock import Fleet, GenerateOutput, PauseMode, SamplingParams
from penstock.errors import StateError
from sim_fleets import SIM, check

BUDGET_S = 15.0
LEAST = 10
"""After so many seconds and so many histories the remaining ones are empty: the machine may be slow."""

Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "sample", "pause", "resume", "update", "update and pause", "abort", "reset", "wait"]),
        st.integers(0, 8),
    ),
    min_size=3,
    max_size=14,
)


@dataclass
class History:
    """What was asked of the fleet, and how it must end."""

    fleet: Fleet
    paused: bool = False
    aborted: bool = False
    asked: list[tuple[list[list[int]], SamplingParams, asyncio.Task[GenerateOutput]]] = field(default_factory=list)
    version: int = 0

    async def run(self, steps: list[Step]) -> None:
        self.version = first = self.fleet.weight_version
        for step, size in steps:
            await self.step(step, size)
        if self.paused:
            await self.fleet.resume_generation()
        for prompts, params, task in self.asked:
            out = await asyncio.wait_for(task, WAIT_S)
            check(prompts, out, params)
            assert set(out.stop_reasons) <= ({"length", "abort"} if self.aborted else {"length"})
            versions = [span.version for spans in out.response_spans for span in spans]
            assert all(first <= version <= self.version for version in versions)
        assert self.fleet.weight_version == self.version
        assert await self.fleet.get_num_unfinished_requests() == 0

    async def step(self, step: str, size: int) -> None:
        match step:
            case "batch" | "sample":
                self.ask(n=1 + size % 3, size=size + 1 if step == "batch" else 1)
            case "pause":
                await self.pause(list(PauseMode)[size % 3])
            case "resume":
                await self.resume()
            case "update":
                self.version = (await self.fleet.update_weights([("w", torch.full((2,), float(size)))])).version
            case "update and pause":
                update = asyncio.create_task(self.fleet.update_weights([("w", torch.ones(size + 1))]))
                await asyncio.sleep(0)
                await self.pause(PauseMode.KEEP)
                self.version = (await update).version
            case "abort":
                self.aborted = True
                await self.fleet.abort_generation()
            case "reset":
                await self.fleet.reset_prefix_cache()
            case _:
                await asyncio.sleep(0.004 * size)

    def ask(self, *, n: int, size: int) -> None:
        params = SamplingParams(max_tokens=5 + 4 * size, n=n, detokenize=False)
        prompts = [[1 + len(self.asked), 2 + i] for i in range(size)]
        sessions = [i % 2 for i in range(size)] if size % 2 else None
        task = asyncio.create_task(
            self.fleet.generate(prompt_token_ids=prompts, sampling_params=params, session_ids=sessions)
        )
        self.asked.append((prompts, params, task))

    async def pause(self, mode: PauseMode) -> None:
        if self.paused:
            with pytest.raises(StateError, match="already paused"):
                await self.fleet.pause_generation(mode)
            return
        await self.fleet.pause_generation(mode)
        self.paused = True

    async def resume(self) -> None:
        if not self.paused:
            with pytest.raises(StateError, match="not paused"):
                await self.fleet.resume_generation()
            return
        await self.fleet.resume_generation()
        self.paused = False


@pytest.fixture(scope="module")
def loop_and_fleet() -> Iterator[tuple[asyncio.Runner, Fleet]]:
    """A loop of its own, because hypothesis calls a plain function, and one fleet for all histories."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        stack = AsyncExitStack()
        yield runner, runner.run(stack.enter_async_context(Fleet.launch("sim-model", engines=3, **SIM)))
        runner.run(stack.aclose())


def test_as_many_answers_as_requests_in_order_and_every_token_true(loop_and_fleet) -> None:
    runner, fleet = loop_and_fleet
    end = time.monotonic() + BUDGET_S
    done = 0

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(STEPS)
    def histories(steps: list[Step]) -> None:
        nonlocal done
        if done < LEAST or time.monotonic() < end:
            runner.run(History(fleet).run(steps))
            done += 1

    histories()
    assert done >= LEAST
