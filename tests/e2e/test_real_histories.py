"""A fixed set of histories on real vLLM CPU engines: requests, pauses, updates, deaths, engines that come and go.

`tests/fleet/test_fleet_machine.py` draws thousands of such on simulated engines; here each token's logprob is
recomputed by transformers under the version that it claims.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from nano_models import History, changed
from penstock import Fleet, GenerateOutput, PauseMode, SamplingParams
from penstock.engine.launch import EngineProcess
from penstock.fleet.member import State
from penstock.types import Sample

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 220
ENDED_S = 300.0
STEPS = {
    "kept": "ask 8, made 300, pause keep, update, ask 4, resume, made 300, update, ask 4, made 100",
    "cut": "ask 8, made 300, pause abort, ask 4, update, resume, made 300, pause abort, resume, update",
    "waited for": "ask 4, made 100, update, pause wait, ask 6, update, resume, made 200, pause abort",
    "killed": "update, ask 12, made 400, kill, update, ask 6, made 200, pause abort, resume, back",
    "killed while paused": "ask 12, made 400, pause keep, kill, update, resume, ask 4, made 200, update",
    "come and gone": "update, ask 12, made 300, replace, update, ask 6, made 200, update",
}


@dataclass
class Run:
    """One history over the fleet."""

    fleet: Fleet
    history: History
    asked: list[tuple[list[list[int]], SamplingParams, asyncio.Task[GenerateOutput]]] = field(default_factory=list)
    paused: bool = False

    async def step(self, text: str) -> None:
        what, _, value = text.partition(" ")
        match what:
            case "ask":
                self.ask(int(value))
            case "made":
                await self.made(int(value))
            case "pause":
                await self.fleet.pause_generation(PauseMode(value))
                self.paused = True
            case "resume":
                await self.fleet.resume_generation()
                self.paused = False
            case "update":
                model = changed(self.history.latest, max(self.history.models))
                self.history.models[(await self.fleet.update_weights(model.named_parameters())).version] = model
            case "kill":
                process = self.live()[-1].process
                assert isinstance(process, EngineProcess)
                os.killpg(process.pid, signal.SIGKILL)
            case "back":
                assert await self.fleet._roster.until(lambda: len(self.live()) == 2, deadline_s=ENDED_S)
            case "replace":
                await self.fleet.add_engines()
                await self.fleet.remove(self.live()[0].name, timeout_s=60)

    def live(self) -> tuple[Any, ...]:
        return self.fleet._roster.live()

    def ask(self, prompts: int) -> None:
        params = SamplingParams(max_tokens=TOKENS, n=1 + prompts % 3, ignore_eos=True, detokenize=False)
        ids = [[5 + len(self.asked), 6 + i, 7] for i in range(prompts)]
        sessions = [i % 3 for i in range(prompts)] if prompts % 2 == 0 else None
        asking = self.fleet.generate(prompt_token_ids=ids, sampling_params=params, session_ids=sessions)
        self.asked.append((ids, params, asyncio.create_task(asking)))

    async def made(self, tokens: int) -> None:
        """Return when that many tokens more were made, or all that was asked for."""

        async def total() -> int:
            return sum(engine.stats.generation_tokens for engine in await self.fleet.engines() if engine.stats)

        before = await total()
        async with asyncio.timeout(60):
            while await total() < before + tokens and not all(task.done() for *_, task in self.asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # engines send no event

    async def end(self) -> None:
        """Every answer is whole and true, and the fleet is what it believes."""
        if self.paused:
            await self.fleet.resume_generation()
        for prompts, params, task in self.asked:
            out = await asyncio.wait_for(task, ENDED_S)
            assert [len(ids) for ids in out.response_ids] == [TOKENS] * len(prompts) * params.n
            assert set(out.stop_reasons) == {"length"}
            for i, sample in enumerate(samples_of(out)):
                assert self.history.worst_difference(prompts[i // params.n], sample) < 1e-4
        await self.step("back")
        for member in self.live():
            info = await member.control.info()
            assert (info.weight_version, info.paused) == (self.fleet.weight_version, False)
            assert member.state is State.SERVING
        assert await self.fleet.get_num_unfinished_requests() == 0


def samples_of(out: GenerateOutput) -> list[Sample]:
    assert out.response_logprobs is not None
    parts = zip(out.response_ids, out.stop_reasons, out.response_logprobs, out.response_spans, strict=True)
    return [Sample(*part) for part in parts]


@pytest.fixture(scope="module")
async def fleet(nano_path: Path) -> AsyncIterator[Fleet]:
    options = {"restart_backoff_s": 0.1, "max_restarts": 100, "stream_chunk_tokens": 16}
    async with Fleet.launch(nano_path, engines=2, profile="cpu", max_model_len=512, **options) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def history(nano_path: Path) -> History:
    return History({0: AutoModelForCausalLM.from_pretrained(nano_path, dtype="float32")})


@pytest.mark.parametrize("name", STEPS)
async def test_history(fleet: Fleet, history: History, name: str) -> None:
    run = Run(fleet, history)
    for step in STEPS[name].split(", "):
        await run.step(step)
    await run.end()
