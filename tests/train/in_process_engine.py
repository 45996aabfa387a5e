"""The engine interface without a server, for tests that steer time: tokens come one by one, as fast as `pause` lets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.control_types import KV, EngineUpdate, TokenLoss, UpdateReport
from penstock.engine.interface import Engine
from penstock.rollout.generator import Trajectory
from penstock.types import Sample, SamplingParams, SessionId, VersionSpan

NextToken = Callable[[Sequence[int], SamplingParams], tuple[int, float]]
"""Prompt and output so far, and the parameters, to the next token and its logprob."""


class InProcessEngine(Engine):
    """Every sample waits `pause()` before each of its tokens; an update waits `pause()` before it takes effect."""

    def __init__(
        self,
        next_token: NextToken = lambda ids, _: (33 + len(ids) % 7, -1.0),
        pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self._next_token = next_token
        self._pause = pause
        self._version = 0
        self.tensors: dict[str, Any] = {}
        self.requests: list[tuple[int, int]] = []
        """For each request: the version in force when it came, and the number of samples."""

    @property
    def weight_version(self) -> int:
        return self._version

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Sample]:
        del session_id, adapter
        params = SamplingParams.of(sampling_params)
        self.requests.append((self._version, num_samples))
        return [await self._one(prompt_token_ids, params) for _ in range(num_samples)]

    async def _one(self, prompt: Sequence[int], params: SamplingParams) -> Sample:
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        for i in range(params.max_tokens):
            await self._pause()
            token, logprob = self._next_token([*prompt, *ids], params)
            ids.append(token)
            logprobs.append(logprob)
            spans.append(VersionSpan(self._version, i, i + 1))
        return Sample(tuple(ids), "length", tuple(logprobs), tuple(spans))

    async def update_weights(
        self, named_tensors: Iterable[tuple[str, Any]], *, version: int | None = None, kv: KV = "recompute"
    ) -> UpdateReport:
        del kv  # it has none
        tensors = {name: tensor.clone() for name, tensor in named_tensors}
        await self._pause()
        self.tensors = tensors
        self._version = self._version + 1 if version is None else version
        engine = EngineUpdate("here", {"bubble": 0.0}, 0, "")
        return UpdateReport(self._version, 0, {"total": 0.0}, (engine,))

    async def recovered(self, report: UpdateReport, *, timeout_s: float = 60.0) -> UpdateReport:
        del timeout_s
        loss = TokenLoss(tokens=10.0 * report.version, seconds=0.1, rate=100.0, back=True)
        return replace(report, engines=tuple(replace(engine, loss=loss) for engine in report.engines))


class Student:
    """A trainee that learns nothing."""

    served_adapter: str | None = None

    def __init__(self) -> None:
        self.version = 0

    def step(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        del trajectories
        self.version += 1
        return {}

    async def put_in_force(self, engine: Engine) -> UpdateReport:
        return await engine.update_weights([], version=self.version)

    def save(self, folder: Path) -> Mapping[str, Any]:
        del folder
        return {"version": self.version}

    def load(self, folder: Path, values: Mapping[str, Any]) -> None:
        del folder
        self.version = values["version"]
