"""Many requests in flight over simulated engine processes, while weights change and engines are killed.

    python tests/fleet/load_run.py [--seconds 300] [--concurrent 2000] [--update-every 5] [--kill-every 20]

Prints one JSON document: what was asked and what came of it, every token held against what the simulated model of its
claimed version says, and the memory of client and router. Exit status 1 where anything failed or was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock import Fleet, SamplingParams
from penstock.engine.launch import EngineProcess
from penstock.errors import PenstockError
from penstock.fleet.member import State

sys.path.append(str(Path(__file__).parents[1]))  # a script's path has its own folder alone

from sim_fleets import CONTEXT, children
from sim_verify import verify

TOKENS = (16, 96)
"""Fewest and most tokens of an answer."""
CHUNK = 16
END_S = 120.0
"""For what is in flight at the end, and for the dead to return."""


@dataclass
class Load:
    """What was done and seen."""

    fleet: Fleet
    router: psutil.Process
    end: float
    """When no new request is begun, by `time.monotonic()`, if enough was done by then."""
    least_updates: int = 0
    least_deaths: int = 0
    """On a machine that stands still for seconds, so many may take longer."""
    began: float = field(default_factory=time.monotonic)
    asked: int = 0
    answered: int = 0
    tokens: int = 0
    crossed: int = 0
    """Answers of more than one version."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    updating: bool = False
    bubbles: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    """Seconds from each death to the engine's serving again."""
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds since the beginning, and resident bytes of this process and of the router's."""

    def over(self, in_s: float = 0.0) -> bool:
        """Whether nothing new is begun in so many seconds."""
        enough = len(self.bubbles) >= self.least_updates and len(self.returns) >= self.least_deaths
        return enough and time.monotonic() + in_s > self.end

    async def ask(self, worker: int) -> None:
        """One request after another."""
        draw = random.Random(worker)
        for turn in itertools.count():
            if self.over():
                return
            prompt = [1 + worker % 1000, 1 + worker // 1000, 1 + turn % 1000, *range(1, draw.randrange(2, 40))]
            params = SamplingParams(max_tokens=draw.randrange(*TOKENS), detokenize=False)
            self.asked += 1
            oldest = self.fleet.weight_version
            try:
                (sample,) = await self.fleet.sample(prompt, 1, params, session_id=worker if worker % 2 else None)
            except PenstockError as error:
                self.failed.append(f"{prompt}: {error}")
                continue
            self.answered += 1
            self.tokens += len(sample.token_ids)
            self.crossed += len(sample.spans) > 1
            wrong = [str(mismatch) for mismatch in verify(prompt, sample, params=params, context=CONTEXT)]
            if sample.finish_reason != "length":
                wrong.append(f"ended by {sample.finish_reason} with {len(sample.token_ids)} tokens")
            # What an engine has confirmed the fleet may learn of a moment later.
            if not oldest <= min(sample.versions()) <= max(sample.versions()) <= self.fleet.weight_version + 1:
                wrong.append(f"versions {sample.spans}, in force were {oldest} to {self.fleet.weight_version}")
            self.wrong += [f"{prompt}: {what}" for what in wrong[:1]]

    async def update(self, number: int) -> None:
        """One weight update; none where the one before is still under way, as a trainer would have it."""
        if self.updating:
            return
        self.updating = True
        try:
            await self._update(number)
        finally:
            self.updating = False

    async def _update(self, number: int) -> None:
        report = await self.fleet.update_weights([("w", torch.full((1024,), float(number)))])
        self.bubbles.append(report.bubble)

    async def kill(self, number: int) -> None:
        """SIGKILL to one engine's process group; returns when it serves again."""
        roster = self.fleet._roster
        member = roster.members[number % len(roster.members)]
        before = len(member.lifecycle.history)
        assert isinstance(member.process, EngineProcess)
        os.killpg(member.process.pid, signal.SIGKILL)
        killed = time.monotonic()

        def back() -> bool:
            return len(member.lifecycle.history) > before and member.state is State.SERVING

        if not await roster.until(back, deadline_s=END_S):
            self.failed.append(f"engine {member.name} did not return: {member.lifecycle.reason}")
        self.returns.append(time.monotonic() - killed)

    async def every(self, seconds: float, do: Callable[[int], Awaitable[None]]) -> None:
        """Do it every so many seconds, until the end."""
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                if self.over(seconds):
                    return
                await asyncio.sleep(seconds)
                group.create_task(self._guarded(do(number)))

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except PenstockError as error:
            self.failed.append(f"control: {error}")

    async def weigh(self, _: int) -> None:
        """Note the memory of client and router."""
        own, router = psutil.Process().memory_info().rss, self.router.memory_info().rss
        self.memory.append((time.monotonic() - self.began, own, router))

    def growth(self, column: int) -> float | None:
        """Memory in the last sixth by that after the first fifth (of five minutes: after the first minute).

        None where the run was so short that it was not read then.
        """
        whole = self.end - self.began
        early = [row[column] for row in self.memory if whole / 5 <= row[0] <= whole / 5 + whole / 6]
        late = [row[column] for row in self.memory if row[0] >= whole * 5 / 6]
        return round(statistics.median(late) / statistics.median(early) - 1, 4) if early and late else None

    def document(self) -> dict[str, Any]:
        """As it is printed."""
        return {
            "requests": {"asked": self.asked, "answered": self.answered, "over_an_update": self.crossed},
            "tokens": {"made": self.tokens, "per_second": round(self.tokens / (time.monotonic() - self.began))},
            "failed": self.failed[:20],
            "wrong": self.wrong[:20],
            "updates": {"count": len(self.bubbles), "bubble_s": _summary(self.bubbles)},
            "deaths": {"count": len(self.returns), "seconds_to_serve_again": _summary(self.returns)},
            "counters": {name: getattr(self.fleet.counters, name) for name in self.fleet.counters.__slots__},
            "memory": {
                "client_mib": round(self.memory[-1][1] / 2**20, 1),
                "router_mib": round(self.memory[-1][2] / 2**20, 1),
                "client_growth": self.growth(1),
                "router_growth": self.growth(2),
            },
            "states": Counter(str(m.state) for m in self.fleet._roster.members),
        }


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3)} if values else {}


async def main() -> int:
    """Run and print."""
    options = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seconds", 300.0), ("update-every", 5.0), ("kill-every", 20.0)):
        options.add_argument(f"--{name}", type=float, default=default)
    # Of each sample: so slow that two cores bear thousands in flight.
    options.add_argument("--tokens-per-second", type=float, default=4.0)
    for name, number in (("concurrent", 2000), ("engines", 4), ("least-updates", 0), ("least-deaths", 0)):
        options.add_argument(f"--{name}", type=int, default=number)
    args = options.parse_args()
    sim = {
        "tokens-per-second": args.tokens_per_second,
        "max-num-seqs": args.concurrent,
        "max-num-batched-tokens": 1 << 20,
        "kv-blocks": 1 << 17,
    }
    options_of_fleet = {"max_model_len": CONTEXT, "extra_args": sim, "stream_chunk_tokens": CHUNK}
    restarts = {"max_restarts": 1000, "restart_backoff_s": 0.2, "restart_window_s": 10.0}
    with tempfile.TemporaryDirectory() as logs:
        async with Fleet.launch(
            "sim-model", args.engines, profile="sim", log_dir=logs, **options_of_fleet, **restarts
        ) as fleet:
            end, least = time.monotonic() + args.seconds, (args.least_updates, args.least_deaths)
            load = Load(fleet, children("router")[0], end, *least)
            await load.weigh(0)
            async with asyncio.timeout(args.seconds + END_S), asyncio.TaskGroup() as group:
                for worker in range(args.concurrent):
                    group.create_task(load.ask(worker))
                group.create_task(load.every(args.update_every, load.update))
                group.create_task(load.every(args.kill_every, load.kill))
                group.create_task(load.every(1.0, load.weigh))
            print(json.dumps(vars(args) | load.document(), indent=2))
    return 1 if load.failed or load.wrong or load.asked != load.answered else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
