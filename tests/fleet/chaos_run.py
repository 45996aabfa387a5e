"""Seeded faults under load: kill, stop and term of router processes, API servers and engine cores.

    python tests/fleet/chaos_run.py MODEL [--profile cpu|sim] [--faults 100] [--seed 0] [--only api,core]
    python tests/fleet/chaos_run.py any --profile sim --only api --clients 60 --update-every 5 --tokens-per-second 40

Three kinds of client ask without pause: plain OpenAI requests and OpenAI streams, which never retry, and
`Fleet.generate`. Each fault waits until the one before is healed. Prints one JSON document: how many requests were
asked and how many failed, by the kind of client and by the fault during which they failed. Exit status 1 where a
request failed that must not: `Fleet.generate` ever; a plain request, or a stream before its first event, by the death
of an engine. An answer with fewer tokens than were asked for, or one that was aborted, is a failure too. A router
process that dies takes the connections of its clients with it: those are counted only, as is what meets two faults.

Simulated engines can be updated meanwhile. Each token of `Fleet.generate` is then held against what their model says of
its claimed version.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import torch

from penstock import Fleet, SamplingParams
from penstock.errors import PenstockError
from penstock.fleet.member import Member, State

sys.path.append(str(Path(__file__).parents[1]))  # a script's path has its own folder alone

from sim_fleets import CONTEXT, children, core_of
from sim_verify import verify

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
VICTIMS = ("router", "api", "core")
HEAL_S = 240.0
"""For an engine to start again and serve on a busy machine."""
REQUEST_S = 180.0
TOKENS = (8, 96)


@dataclass
class Chaos:
    """What was done and seen."""

    fleet: Fleet
    model: str
    draw: random.Random
    router_processes: int
    simulated: bool = False
    fault: str = "none"
    over: bool = False
    asked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """By kind of client and fault, as "plain | core kill"."""
    why: dict[str, str] = field(default_factory=dict)
    """One reason for each key of `failed`."""
    faults: Counter[str] = field(default_factory=Counter)
    heal_s: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    updates: int = 0
    memory: list[int] = field(default_factory=list)
    """Resident bytes of this process and of the router's, after each fault."""

    def now(self) -> tuple[str, int]:
        """Return the fault in force, and how many there were."""
        return self.fault, self.faults.total()

    def fail(self, kind: str, began: tuple[str, int], why: str) -> None:
        """Count a failure by the fault it met: that in force when it began, or now."""
        fault, before = began
        met = self.faults.total() - before + (fault != "none")
        key = f"{kind}{' of two faults' * (met > 1)} | {self.fault if self.fault != 'none' else fault}"
        self.failed[key] += 1
        self.why.setdefault(key, why[:300])

    # --- clients -----------------------------------------------------------------------------------------------------

    def _body(self, draw: random.Random, turn: int, *, stream: bool) -> dict[str, Any]:
        prompt = [5 + turn % 20, 6, 7 + draw.randrange(8)]
        tokens = draw.randrange(*TOKENS)
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        return {**body, "stream_options": {"include_usage": True}} if stream else body

    async def plain(self, number: int, http: aiohttp.ClientSession) -> None:
        """Requests that a client sends once."""
        draw = random.Random(f"plain {number}")
        for turn in itertools.count():
            if self.over:
                return
            began, body = self.now(), self._body(draw, turn, stream=False)
            self.asked["plain"] += 1
            try:
                async with http.post("/v1/completions", json=body) as answer:
                    text = await answer.text()
                    why = f"{answer.status}: {text}" if answer.status != 200 else short(body, [orjson.loads(text)])
                    if why:
                        self.fail("plain", began, why)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.fail("plain", began, repr(error))
                await asyncio.sleep(0.2)  # what refuses connections does so at once

    async def stream(self, number: int, http: aiohttp.ClientSession) -> None:
        """Streams; one that breaks off after its first event is told apart."""
        draw = random.Random(f"stream {number}")
        for turn in itertools.count():
            if self.over:
                return
            began, events, body = self.now(), list[Any](), self._body(draw, turn, stream=True)
            self.asked["stream"] += 1
            try:
                async with http.post("/v1/completions", json=body) as answer:
                    last = b""
                    async for line in answer.content:
                        if not line.startswith(b"data: "):
                            continue
                        last = line[6:].strip()
                        if last != b"[DONE]":
                            events.append(orjson.loads(last))
                            if "error" in events[-1]:
                                raise aiohttp.ClientPayloadError(last.decode())
                    if answer.status != 200 or last != b"[DONE]":
                        raise aiohttp.ClientPayloadError(f"status {answer.status}, last event {last[:200]!r}")
                    if why := short(body, events):  # after an event nothing can take an abort back
                        self.fail("stream begun" if "'abort'" in why else "stream short", began, why)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.fail("stream begun" if events else "stream", began, repr(error))
                await asyncio.sleep(0.2)

    async def through_fleet(self, number: int) -> None:
        """Requests of the fleet's own client: each is answered, whole."""
        draw = random.Random(f"fleet {number}")
        for turn in itertools.count():
            if self.over:
                return
            began, tokens, session = self.now(), draw.randrange(*TOKENS), f"{number}-{turn // 4}"
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
            self.asked["fleet"] += 1
            prompt = [5 + turn % 20, 9, 9]
            try:
                (sample,) = await self.fleet.sample(prompt, 1, params, session_id=session)
            except PenstockError as error:
                self.fail("fleet", began, repr(error))
                continue
            if not len(sample.token_ids) == len(sample.logprobs or ()) == len(sample.versions()) == tokens:
                self.wrong.append(f"{tokens} asked, {len(sample.token_ids)} came, spans {sample.spans}")
            elif self.simulated and (wrong := verify(prompt, sample, params=params, context=CONTEXT)):
                self.wrong.append(f"{prompt}: {wrong[0]}, spans {sample.spans}")

    async def update(self, every_s: float) -> None:
        """New weights every so many seconds, as a trainer gives them."""
        while not self.over:
            began = self.now()
            try:
                await self.fleet.update_weights([("w", torch.full((1024,), float(self.updates)))])
                self.updates += 1
            except PenstockError as error:
                self.fail("update", began, repr(error))
            await asyncio.sleep(every_s)

    # --- faults ------------------------------------------------------------------------------------------------------

    async def strike(self, victim: str, how: str) -> None:
        """One fault; returns when all is healed."""
        self.fault = f"{victim} {how}"
        self.faults[self.fault] += 1
        began = time.monotonic()
        if victim == "router":
            target = self.draw.choice(router_processes())
            starts_others = bool(target.children())
            os.kill(target.pid, SIGNALS[how])
            # A stopped process that only starts the workers is missed when one of them ends, by a later fault.
            await self._router_heals(target, ends=not (how == "stop" and starts_others))
        else:
            member = self.draw.choice([m for m in self.fleet._roster.members if m.state is State.SERVING])
            pid = member.process.pid if victim == "api" else core_of(member.process.pid)
            before = len(member.lifecycle.history)
            os.kill(pid, SIGNALS[how])
            await self._engine_heals(member, before)
        self.heal_s.setdefault(self.fault, []).append(time.monotonic() - began)
        await asyncio.sleep(self.draw.uniform(0.5, 1.5))  # under load, before the next
        self.fault = "none"
        self.memory.append(sum(p.memory_info().rss for p in [psutil.Process(), *router_processes()]))

    async def _engine_heals(self, member: Member, before: int) -> None:
        def back() -> bool:
            return len(member.lifecycle.history) > before and member.state is State.SERVING

        if not await self.fleet._roster.until(back, deadline_s=HEAL_S):
            self.wrong.append(f"{self.fault}: {member.name} did not return: {member.lifecycle.reason}")

    async def _router_heals(self, target: psutil.Process, *, ends: bool) -> None:
        deadline = time.monotonic() + HEAL_S
        while time.monotonic() < deadline:
            gone = not ends or not target.is_running() or target.status() == psutil.STATUS_ZOMBIE
            if gone and len(router_processes()) >= self.router_processes and await self._answers():
                return
            await asyncio.sleep(0.05)  # processes of others give no event
        self.wrong.append(f"{self.fault}: the router did not return, of which {target} was struck")

    async def _answers(self) -> bool:
        params = SamplingParams(max_tokens=1, detokenize=False)
        try:
            await asyncio.wait_for(self.fleet.sample([5, 6], 1, params), 60)
        except (PenstockError, TimeoutError):
            return False
        return True

    def document(self) -> dict[str, Any]:
        """As it is printed."""
        heal = {fault: [round(min(s), 1), round(max(s), 1)] for fault, s in sorted(self.heal_s.items())}
        return {
            "asked": dict(self.asked),
            "faults": dict(sorted(self.faults.items())),
            "failed": dict(sorted(self.failed.items())),
            "broken": self.broken(),
            "why": self.why,
            "seconds_to_heal_min_max": heal,
            "wrong": self.wrong[:20],
            "updates": self.updates,
            "memory_mib": [size >> 20 for size in self.memory],
        }

    def broken(self) -> list[str]:
        """Failures that must not be."""
        by_router = tuple(f"router {how}" for how in SIGNALS)
        spared = ("stream begun", "plain of two", "stream of two")  # the router tries two engines
        counted = {key for key in self.failed if key.startswith(spared) or key.endswith(by_router)}
        return [key for key in self.failed if key.startswith("fleet") or key not in counted]


def short(body: dict[str, Any], answers: list[Any]) -> str:
    """What an answer, or the events of a stream, lack of what was asked for; empty: nothing."""
    if strange := [answer for answer in answers if "choices" not in answer]:
        return f"no answer, though its status is 200: {strange[0]}"
    reasons = [c["finish_reason"] for a in answers for c in a["choices"] if c.get("finish_reason") is not None]
    made = sum(a["usage"]["completion_tokens"] for a in answers if a.get("usage"))
    if reasons == ["length"] and made == body["max_tokens"]:
        return ""
    return f"{body['max_tokens']} tokens were asked for, {made} came, ended by {reasons}"


def router_processes() -> list[psutil.Process]:
    """The router's process and its workers, without those that have ended."""
    whole = [p for parent in children("router") for p in (parent, *parent.children(recursive=True))]
    return [p for p in whole if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def main() -> int:
    """Run and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--profile", default="cpu", choices=["cpu", "gpu", "sim"])
    options.add_argument("--only", default=",".join(VICTIMS), help="kinds of victim, comma-separated")
    options.add_argument("--engine", type=json.loads, default={}, help="further fields of EngineConfig, as JSON")
    options.add_argument("--seconds", type=float, default=8700.0, help="no fault is begun after so long")
    options.add_argument("--update-every", type=float, default=0.0, help="seconds; simulated engines only; 0: never")
    options.add_argument("--tokens-per-second", type=float, default=200.0, help="of a sample of a simulated engine")
    for name, default in (("faults", 100), ("seed", 0), ("engines", 2), ("workers", 2), ("clients", 6)):
        options.add_argument(f"--{name}", type=int, default=default)
    args = options.parse_args()
    fleet_options: dict[str, Any] = {"restart_backoff_s": 0.1, "hang_timeout_s": 9.0, "control_timeout_s": 20.0}
    if args.profile == "sim":
        fleet_options["extra_args"] = {"tokens-per-second": args.tokens_per_second, "max-num-seqs": 3 * args.clients}
    fleet_options |= args.engine
    with tempfile.TemporaryDirectory() as logs:
        async with Fleet.launch(
            args.model, args.engines, profile=args.profile, max_model_len=CONTEXT, log_dir=logs, workers=args.workers,
            **fleet_options,
        ) as fleet:  # fmt: skip
            chaos = Chaos(fleet, args.model, random.Random(args.seed), len(router_processes()), args.profile == "sim")
            await run(chaos, args)
            print(json.dumps(vars(args) | chaos.document(), indent=2))
    return 1 if chaos.broken() or chaos.wrong else 0


async def run(chaos: Chaos, args: argparse.Namespace) -> None:
    """Load and faults until all faults are through."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    faults = list(itertools.product(args.only.split(","), SIGNALS))
    async with aiohttp.ClientSession(chaos.fleet.url, timeout=timeout) as http, asyncio.TaskGroup() as group:
        for number in range(args.clients):
            group.create_task(chaos.plain(number, http))
            group.create_task(chaos.stream(number, http))
            group.create_task(chaos.through_fleet(number))
        if args.update_every:
            group.create_task(chaos.update(args.update_every))
        try:
            end = time.monotonic() + args.seconds
            for number in range(args.faults):
                if time.monotonic() > end:
                    break
                if number % len(faults) == 0:
                    chaos.draw.shuffle(faults)
                await chaos.strike(*faults[number % len(faults)])
                print(f"{number + 1}/{args.faults} {list(chaos.faults)[-1]}: {dict(chaos.failed)}", file=sys.stderr)
        finally:
            chaos.over = True


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
