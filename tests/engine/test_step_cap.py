"""Between `prepare` and `apply` an engine makes small steps, so that an update waits for no large one."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import pytest

from penstock.plugin import pause
from penstock.plugin.pause import StepCap
from penstock.plugin.steps import Steps
from penstock.weights.shared_memory import SharedMemoryStore

pytestmark = pytest.mark.vllm


def _config(*, chunked: bool = True, whole_images: bool = False) -> SimpleNamespace:
    return SimpleNamespace(enable_chunked_prefill=chunked, disable_chunked_mm_input=whole_images)


@dataclass
class Scheduler:
    """As much of vLLM's as its step asks for."""

    requests: bool = True
    max_num_scheduled_tokens: int = 8192
    max_num_running_reqs: int = 256
    num_spec_tokens: int = 0
    block_size: int = 16
    max_model_len: int = 6000
    scheduler_config: Any = field(default_factory=_config)
    budgets: list[int] = field(default_factory=list)
    after_step: Any = None

    def has_requests(self) -> bool:
        return self.requests

    def schedule(self, throttle_prefills: bool) -> Any:  # noqa: FBT001
        assert not throttle_prefills
        self.budgets.append(self.max_num_scheduled_tokens)
        number = len(self.budgets)
        return SimpleNamespace(number=number, total_num_scheduled_tokens=1, pending_structured_output_tokens=False)

    def get_grammar_bitmask(self, output: Any) -> None: ...

    def update_from_output(self, output: Any, sampled: Any) -> dict[int, int]:
        assert sampled == "sampled"
        self.after_step()
        return {0: output.number}


class Loop:
    """vLLM's own `step_with_batch_queue`, of a scheduler and workers that note what they are asked."""

    def __init__(self) -> None:
        from vllm.v1.engine.core import EngineCore

        self.done: list[str] = []
        self.handed_on: list[tuple[int, int]] = []
        self.scheduler = Scheduler()
        kind = {"is_pooling_model": False, "is_ec_consumer": True, "is_mm_encoder_only": False}
        self.core = MagicMock(batch_queue=deque(), batch_queue_size=2, scheduler=self.scheduler, **kind)
        self.core.check_for_draft_tokens = False
        self.core._should_throttle_prefills = lambda: False
        self.core.model_executor = self
        self.step = partial(EngineCore.step_with_batch_queue, self.core)
        self.seen = Steps(lambda: 0.0)
        self.cap = StepCap(self.core, self.seen)
        self.scheduler.after_step = lambda: self.seen.count(0, 1)

    def execute_model(self, output: Any, *, non_block: bool) -> Any:
        assert non_block
        self.done.append(f"launch {output.number}")
        self._launched = SimpleNamespace(result=lambda: self._end(output.number))
        return self._launched

    def sample_tokens(self, bitmask: None, *, non_block: bool) -> Any:
        assert (bitmask, non_block) == (None, True)
        return self._launched

    def _end(self, number: int) -> str:
        self.done.append(f"end {number}")
        return "sampled"

    def steps(self, count: int) -> list[str]:
        """What that many turns of the core's loop did."""
        before = len(self.done)
        for _ in range(count):
            outputs, _ = self.step()
            self.handed_on += (outputs or {}).items()
        return self.done[before:]


def test_prepare_is_told_when_what_was_launched_before_has_ended_and_steps_are_small_until_apply():
    loop = Loop()
    assert loop.steps(3) == ["launch 1", "launch 2", "end 1", "launch 3", "end 2"]
    cap = loop.cap
    assert loop.seen.after == set(), "a step asks nothing of the cap"
    prepared = cap.begin()
    assert not prepared.done()
    assert loop.steps(1) == ["launch 4", "end 3"]
    assert prepared.result(0) == {"ok": True}
    assert loop.steps(1) == ["launch 5", "end 4"]
    assert len(loop.seen.after) == 1
    cap.end()
    assert loop.seen.after == set()
    assert loop.steps(2) == ["launch 6", "end 5", "launch 7", "end 6"]
    assert loop.scheduler.budgets == [8192] * 3 + [1024] * 2 + [8192] * 2
    assert loop.handed_on == [(0, number) for number in range(1, 7)], "every answer, once and in order"


def test_of_nothing_under_way_prepare_is_told_at_once_and_again():
    loop = Loop()
    cap = loop.cap
    assert cap.begin().done()
    loop.steps(2)
    assert cap.begin().done(), "what is under way is small already"
    cap.end()
    assert loop.scheduler.max_num_scheduled_tokens == 8192


def test_an_update_that_does_not_come_leaves_no_small_steps(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(pause, "time", clock)
    loop = Loop()
    loop.cap.begin()
    loop.steps(1)
    clock.now += pause.CAP_S + 1
    loop.steps(2)
    assert loop.scheduler.budgets == [1024, 1024, 8192]
    assert loop.seen.after == set()


def test_a_step_that_was_under_way_when_everything_is_paused_is_waited_for():
    loop = Loop()
    loop.steps(2)
    prepared = loop.cap.begin()
    loop.scheduler.requests = False
    loop.steps(1)
    assert (prepared.done(), list(loop.core.batch_queue), loop.done[-1]) == (True, [], "end 2")


@pytest.mark.parametrize(
    ("given", "config", "tokens"),
    [
        ({}, {}, 1024),
        ({"max_num_running_reqs": 4000}, {}, 4016),
        ({"max_num_running_reqs": 512, "num_spec_tokens": 3}, {}, 2064),
        ({"max_num_scheduled_tokens": 512}, {}, 512),
        ({}, {"chunked": False}, 6000),
        ({}, {"whole_images": True}, 6000),
    ],
)
def test_a_small_step_has_room_for_every_running_request_and_keeps_no_prompt_waiting(
    given: dict[str, int], config: dict[str, bool], tokens: int
):
    loop = Loop()
    vars(loop.scheduler).update(given, scheduler_config=_config(**config))
    before = loop.scheduler.max_num_scheduled_tokens
    cap = loop.cap
    cap.begin()
    assert loop.scheduler.max_num_scheduled_tokens == tokens
    cap.end()
    assert loop.scheduler.max_num_scheduled_tokens == before


async def test_a_real_engine_makes_them_from_prepare_to_apply(live):
    """20,000 tokens of prompts take at least 20 steps of 1,024 and, of 2,048, a dozen."""
    store = SharedMemoryStore()
    model = live.history.models[max(live.history.models)]
    try:
        manifest = store.publish(max(live.history.models) + 1, list(model.named_parameters()))
        before = await prompts(live, seed=1)
        await live.engine.control.prepare_weights(manifest)
        between = await prompts(live, seed=2)
        await live.update(model)
        after = await prompts(live, seed=3)
    finally:
        store.close()
    assert between >= 20
    assert before < 18
    assert after < 18


async def prompts(live: Any, seed: int) -> float:
    """Let the engine read 40 prompts of 500 tokens; in how many steps."""
    url = live.engine.control.url
    chance = random.Random(seed)
    prompts = [[chance.randrange(2, 100) for _ in range(500)] for _ in range(40)]
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {live.key}"}) as session:
        before = await steps_of(session)
        body = {"model": str(live.model_path), "prompt": prompts, "max_tokens": 1}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        return await steps_of(session) - before


async def steps_of(session: aiohttp.ClientSession) -> float:
    """Steps that an engine has made since it began."""
    async with session.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:iteration_tokens_total_count"))
