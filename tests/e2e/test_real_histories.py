"""A fixed set of histories on real vLLM CPU engines: requests, pauses, updates, deaths, engines that come and go.

`tests/fleet/test_fleet_machine.py` draws thousands of such on simulated engines; here each token's logprob is
recomputed by transformers under the version that it claims.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hold import Hold
from nano_models import History
from penstock import Fleet, GenerateOutput, PauseMode, SamplingParams
from penstock.fleet.member import State
from sim_fleets import samples_of, strike

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 220
ENDED_S = 300.0
STEPS = {
    "kept": "ask 8, made, pause keep, update, ask 4, resume, made, update, ask 4, made",
    "cut": "ask 8, made, pause abort, ask 4, update, resume, made, pause abort, resume, update",
    "waited for": "ask 4, made, update, pause wait, ask 6, update, resume, made, pause abort",
    "killed": "update, ask 12, made, kill, update, ask 6, made, pause abort, resume, back",
    "killed while paused": "ask 12, made, pause keep, kill, update, resume, ask 4, made, update",
    "come and gone": "update, ask 12, made, replace, update, ask 6, made, update",
}


@dataclass
class Run:
    """One history over the fleet, whose requests are held but for moments: every step finds them in flight."""

    fleet: Fleet
    history: History
    hold: Hold
    asked: list[tuple[list[list[int]], SamplingParams, asyncio.Task[GenerateOutput]]] = field(default_factory=list)
    paused: bool = False
    limit: int = 20
    first: int = 0
    """Of `asked`, that has not been let go."""
    standing: set[int] = field(default_factory=set)
    """Which of `asked` have tokens and are in flight."""
    crossed: set[int] = field(default_factory=set)
    """Which of `asked` an update met."""

    async def step(self, text: str) -> None:
        what, _, value = text.partition(" ")
        match what:
            case "ask":
                self.ask(int(value))
            case "made":
                await self.made()
            case "pause":
                if value == "wait":
                    self.let_go()
                await self.fleet.pause_generation(PauseMode(value))
                self.paused = True
            case "resume":
                await self.fleet.resume_generation()
                self.paused = False
            case "update":
                self.crossed |= self.standing
                await self.history.update(self.fleet, max(self.history.models))
            case "kill":
                strike(self.live()[-1])
                self.standing = set()  # of those on this engine, no token may have been told
            case "back":
                assert await self.fleet._roster.until(lambda: len(self.live()) == 2, deadline_s=ENDED_S)
            case "replace":
                await self.fleet.add_engines()
                self.let_go()
                await self.fleet.remove(self.live()[0].name, timeout_s=ENDED_S)
                await asyncio.wait([task for *_, task in self.asked])

    def live(self) -> tuple[Any, ...]:
        return self.fleet._roster.live()

    def ask(self, prompts: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, n=1 + prompts % 3, ignore_eos=True, detokenize=False)
        ids = [[5 + len(self.asked), 6 + i, 7] for i in range(prompts)]
        sessions = [i % 3 for i in range(prompts)] if prompts % 2 == 0 else None
        asking = self.fleet.generate(prompt_token_ids=ids, sampling_params=params, session_ids=sessions)
        self.hold.move(self.limit)
        self.asked.append((ids, params, asyncio.create_task(asking)))

    async def made(self) -> None:
        """Return when all that was asked for, and has not been let go, has more tokens."""
        self.limit += 20
        self.hold.move(self.limit)
        asked = [(i, len(ids) * params.n) for i, (ids, params, _) in enumerate(self.asked) if i >= self.first]
        await self.hold.reached(sum(number for _, number in asked))
        self.standing = {i for i, _ in asked}

    def let_go(self) -> None:
        """Let all that was asked for go on to its end."""
        self.hold.release()
        self.first, self.standing = len(self.asked), set()

    async def end(self) -> None:
        """Every answer is whole and true, and the fleet is what it believes."""
        self.let_go()
        if self.paused:
            await self.fleet.resume_generation()
        for number, (prompts, params, task) in enumerate(self.asked):
            out = await asyncio.wait_for(task, ENDED_S)
            assert [len(ids) for ids in out.response_ids] == [TOKENS] * len(prompts) * params.n
            assert set(out.stop_reasons) == {"length"}
            for i, sample in enumerate(samples_of(out)):
                assert len(sample.spans) > (number in self.crossed)
                assert self.history.worst_difference(prompts[i // params.n], sample) < 1e-4
        await self.step("back")
        for member in self.live():
            info = await member.control.info()
            assert (info.weight_version, info.paused) == (self.fleet.weight_version, False)
            assert member.state is State.SERVING
        assert await self.fleet.get_num_unfinished_requests() == 0


@pytest.fixture(scope="module")
async def fleet(nano_path: Path, hold: Hold) -> AsyncIterator[Fleet]:
    options = {"restart_backoff_s": 0.1, "max_restarts": 100, "stream_chunk_tokens": 16, "extra_args": hold.extra_args}
    async with Fleet.launch(nano_path, engines=2, profile="cpu", max_model_len=512, **options) as fleet:
        yield fleet


@pytest.mark.parametrize("name", STEPS)
async def test_history(fleet: Fleet, history: History, hold: Hold, name: str) -> None:
    run = Run(fleet, history, hold)
    try:
        for step in STEPS[name].split(", "):
            await run.step(step)
    finally:
        hold.release()
    await run.end()
