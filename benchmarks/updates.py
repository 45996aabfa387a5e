"""Weight updates under load on real CPU engines: the bubble, what is lost, and what the field's usual loop costs.

    python benchmarks/updates.py [--engines 2] [--concurrent 64 256] [--updates 20]

Four ways take turns on the same engines, in rounds: no updates; `keep` (an update in flight); `abort` (pause with
abort, update, resume: what was in flight goes on from its tokens); and the naive loop: pause with vLLM's own abort,
five seconds of grace, update, resume, while clients that were cut ask every half second whether they may go on, and
begin anew. Before each round the same updates on idle engines. A token is wasted when an engine made it and no answer
has it. A bubble is the time in which an engine's core was held, by its own clock; of two engines, the longer one.
The clients are a process of their own (`_update_load.py`). About nine minutes in all, the start of the engines
included; one and a half with `--quick`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common
import _engine_key
import aiohttp
import torch
from _closed_loop import made
from _line_process import LineProcess
from transformers import AutoModelForCausalLM

from penstock.aio import all_or_first_error
from penstock.control_types import PauseMode
from penstock.engine.control import ControlClient
from penstock.fleet.fleet import Fleet

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
ROUNDS = 4
BETWEEN_S = 1.0
"""From one update to the next."""
QUIET_S = 6.0
"""Window without updates."""
GRACE_S = 5.0
AFTER_S = 6.0
"""The same of the naive loop: its clients need seconds to make again what was thrown away."""
ANSWER_S = 300.0
"""Deadline of the load's answers; one of them is given when all requests in flight have ended."""
BUBBLE_BAR = 2.0
"""Times the idle round: control must not queue behind data."""
GOODPUT_BAR = 0.85


@dataclass
class Side:
    """What one way to update gave, all rounds together."""

    bubbles: list[float] = field(default_factory=list)
    """Seconds in which the core was held."""
    idle: list[float] = field(default_factory=list)
    """The same, of engines that have nothing to do."""
    updates: int = 0
    seconds: float = 0.0
    """Windows in which tokens were counted."""
    good: int = 0
    """Tokens made in them, less those thrown away."""
    wasted: int = 0
    requeued: int = 0
    """Tokens that a client sent again."""
    failed: int = 0
    lost: list[float] = field(default_factory=list[float])
    """Tokens that updates cost, as the fleet measures it (`UpdateReport.tokens_lost`)."""

    @property
    def goodput(self) -> float:
        """Useful tokens a second."""
        return self.good / self.seconds


class Load:
    """`_update_load.py`."""

    def __init__(self, router: str, urls: Sequence[str]) -> None:
        path = str(Path(__file__).parent / "_update_load.py")
        self._process = LineProcess([sys.executable, path, router, *urls])

    async def ask(self, command: str) -> dict[str, int]:
        """Its answer to a line."""
        async with asyncio.timeout(ANSWER_S):
            line = await asyncio.to_thread(self._process.ask, command)
        if not line:
            raise RuntimeError("the process with the load has ended")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.close()


class Bench:
    """A fleet, the same engines as the naive loop sees them, and the load on both."""

    def __init__(self, fleet: Fleet, urls: list[str]) -> None:
        self.fleet = fleet
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        _engine_key.share(fleet)
        key = _engine_key.key()
        self.controls = [ControlClient(f"e{i}", url, api_key=key) for i, url in enumerate(urls)]
        self.load = Load(fleet.url, urls)
        self._urls = urls
        self._http = aiohttp.ClientSession(headers=_engine_key.bearer(), timeout=aiohttp.ClientTimeout(ANSWER_S))
        self._cores: list[str] = []

    async def close(self) -> None:
        """End the load and close the connections."""
        await self._http.close()
        self.load.close()
        for control in self.controls:
            await control.close()

    # --- ways to update ----------------------------------------------------------------------------------------------

    async def keep(self) -> float:
        """In flight; the engines say themselves how long each of them made nothing."""
        self._step()
        self.last = await self._update()
        return self.last.bubble

    async def abort(self) -> float:
        """Everything in flight gives up its KV and goes on: three control calls instead of one."""
        self._step()
        before = await self._held()
        await self.fleet.pause_generation(PauseMode.ABORT)
        await self._update()
        await self.fleet.resume_generation()
        return await self._longest_since(before)

    async def naive(self) -> float:
        """Everything in flight is cut and begins anew."""
        self._step()
        before = await self._held()
        await all_or_first_error(control.verbs.release() for control in self.controls)
        await asyncio.sleep(GRACE_S)
        await self._update()
        await all_or_first_error(control.verbs.resume() for control in self.controls)
        return await self._longest_since(before)

    async def _longest_since(self, before: Sequence[float]) -> float:
        return max(after - began for after, began in zip(await self._held(), before, strict=True))

    async def _held(self) -> list[float]:
        """Seconds in which each core was held in its life."""
        if not self._cores:
            for url in self._urls:
                async with self._http.get(f"{url}/penstock/info") as answer:
                    port = (await answer.json())["control_port"]
                self._cores.append(f"http://127.0.0.1:{port}/penstock/core")
        held: list[float] = []
        for core in self._cores:
            async with self._http.post(core) as answer:
                held.append((await answer.json())["held_s"])
        return held

    def _step(self) -> None:
        """A trainer's step, which comes before the update and is no part of it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-4)

    async def _update(self) -> Any:
        return await self.fleet.update_weights(self.model.named_parameters())

    # --- measurement -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def window(self, side: Side, way: str, concurrent: int) -> AsyncGenerator[None]:
        """Load around what is measured; everything in flight ends before the next side's turn."""
        whole = await made(self.fleet)
        await self.load.ask(f"{way} {concurrent}")
        await asyncio.sleep(2.0)
        thrown = (await self.load.ask("so_far"))["thrown_away"]
        before, began = await made(self.fleet), time.perf_counter()
        yield
        side.seconds += time.perf_counter() - began
        side.good += await made(self.fleet) - before + thrown
        side.good -= (await self.load.ask("so_far"))["thrown_away"]
        ended = await self.load.ask("stop")
        wasted = await made(self.fleet) - whole - ended["received"]
        side.wasted += wasted
        side.failed += ended["failed"]
        side.requeued += ended["requeued"]
        if not 0 <= ended["thrown_away"] <= wasted:
            raise RuntimeError(f"the counts of tokens do not add up: {side}")

    async def round(self, sides: dict[str, Side], concurrent: int, updates: int, naive_updates: int) -> None:
        """Each side once."""
        for name in ("keep", "abort"):
            for _ in range(updates):
                sides[name].idle.append(await getattr(self, name)())
        async with self.window(sides["none"], "ask", concurrent):
            await asyncio.sleep(QUIET_S)
        for name, way, count, between_s in (
            ("keep", "ask", updates, BETWEEN_S),
            ("abort", "ask", updates, BETWEEN_S),
            ("naive", "ask_naively", naive_updates, AFTER_S),
        ):
            side = sides[name]
            async with self.window(side, way, concurrent):
                for _ in range(count):
                    side.bubbles.append(await getattr(self, name)())
                    await asyncio.sleep(between_s)
                    if name == "keep" and (lost := (await self.fleet.recovered(self.last)).tokens_lost) is not None:
                        side.lost.append(lost)
            side.updates += count
            bubbles = ", ".join(f"{1000 * bubble:.0f}" for bubble in side.bubbles[-count:])
            _common.note(f"{concurrent} in flight, {name}: {side.goodput:.0f} tokens/s, bubbles {bubbles} ms")


def rows(sides: dict[str, Side], concurrent: int) -> list[_common.Row]:
    """What the bars are for."""
    none, keep, abort, naive = (sides[name] for name in ("none", "keep", "abort", "naive"))
    what = f"{concurrent} in flight"
    made_rows: list[_common.Row] = []
    for name, side in (("keep", keep), ("abort", abort)):
        case = f"{what}, {name}, {side.updates} updates"
        for which, of in (("median", statistics.median), ("max", max)):
            bubble, idle = of(side.bubbles), of(side.idle)
            made_rows.append(
                _common.compare(
                    f"{case}: bubble {which} by the idle round's, s", bubble, idle, bar=BUBBLE_BAR, want="at most"
                )
            )
        made_rows += [
            _common.single(f"{case}: wasted tokens", side.wasted, bar=0, want="at most"),
            _common.single(f"{case}: failed requests", side.failed, bar=0, want="at most"),
            _common.compare(
                f"{case}, one every {BETWEEN_S:g} s: useful tokens/s by those without updates",
                side.goodput, none.goodput, bar=GOODPUT_BAR, want="at least",
            ),
        ]  # fmt: skip
    for name, side in (("keep", keep), ("abort", abort)):
        made_rows += [
            _common.single(f"{what}, {name}: tokens requeued", side.requeued, bar=0, want="at most"),
            _common.compare(
                f"{what}: bubble median of {name} by the naive loop's, s",
                statistics.median(side.bubbles), statistics.median(naive.bubbles), bar=0.1, want="at most",
            ),
            _common.compare(
                f"{what}: useful seconds lost for each update, {name} by the naive loop",
                lost(side, none), lost(naive, none), bar=0.1, want="at most",
            ),
        ]  # fmt: skip
    wasted = naive.wasted / naive.updates
    made_rows.append(
        _common.compare(
            f"{what}: tokens wasted for each update, ours by the naive loop's",
            (keep.wasted + abort.wasted) / (keep.updates + abort.updates), wasted, bar=0.0, want="at most",
        )
    )  # fmt: skip
    if keep.lost:
        median = statistics.median(keep.lost)
        case = f"{what}: tokens lost by an update of keep, by those that the naive loop wastes"
        made_rows.append(_common.compare(case, median, wasted, bar=0.1, want="at most"))
    return made_rows


def lost(side: Side, none: Side) -> float:
    """Seconds of full throughput that one update costs; noise can make it seem to cost nothing."""
    return max(0.0, side.seconds * (1 - side.goodput / none.goodput) / side.updates)


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    options.add_argument("--updates", type=int, default=20)
    args = options.parse_args()
    rounds = 1 if args.quick else ROUNDS
    updates = 2 if args.quick else max(1, args.updates // ROUNDS)
    made_rows: list[_common.Row] = []
    # As the demo's trainer: where engines have every core, each of torch's loops waits for the thread that got none.
    torch.set_num_threads(1)
    # The naive loop pauses engines itself. A probe would find them paused by another process and resume them.
    async with Fleet.launch(
        MODEL, args.engines, profile="cpu", max_model_len=256, max_num_seqs=256, health_interval_s=3600.0
    ) as fleet:
        bench = Bench(fleet, [engine.url for engine in await fleet.engines()])
        await bench.load.ask(f"ask {max(args.concurrent)}")  # the first requests warm kernels up
        await asyncio.sleep(1.0)
        await bench.load.ask("stop")
        # The clock shares this process: a collection over all that torch and transformers have imported takes up to a
        # second, which would be found in a bubble that no engine had. vLLM's server freezes its own.
        gc.collect()
        gc.freeze()
        for concurrent in args.concurrent:
            sides: dict[str, Side] = defaultdict(Side)
            for _ in range(rounds):
                await bench.round(sides, concurrent, updates, 1)
            made_rows += rows(sides, concurrent)
        await bench.close()
    return _common.report("updates", made_rows)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
