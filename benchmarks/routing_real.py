"""Where multi-turn sessions go over two real vLLM CPU engines: `bounded-sticky` against `round-robin` and vllm-router.

python benchmarks/routing_real.py [--rounds 5] [--sessions 24] [--turns 6]

One trace in token space for each round, the same for every router: sessions of one common system prompt, each turn all
that was said before and something new. Their contexts together fill most of both engines' KV caches, so that a router
that spreads a session over both has it computed twice and pushes out others. The routers take turns before the same
engines, each started anew, with the engines' prefix caches cleared, in an order drawn for each round. vllm-router's
figures are each those of the best of three policies. Needs the extra `bench`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import _engine_key
import _routers
import psutil

from penstock.fleet.fleet import Fleet
from penstock.http import HttpTransport
from penstock.types import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
VOCABULARY = range(5, 90)
MAX_MODEL_LEN = 8192
SYSTEM = 512
"""Tokens that every prompt begins with."""
ANSWER = 24
"""Tokens of each answer."""
NEW = (128, 1024)
"""Fewest and most tokens that a turn adds; half of the sessions add few, as agents' tools do."""
THINK_S = 0.1
"""Mean time between an answer and the next turn."""
KV_SHARE = 0.9
"""Of both KV caches together, what the sessions' contexts fill in the end."""
KV_TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
"""Of this model: layers, keys and values, heads, their size, fp32."""

OURS = "bounded-sticky"
PEER = "vllm-router"
PEER_POLICIES = ("consistent_hash", "sticky_least_loaded", "cache_aware")
SIDES = (OURS, "round-robin", *(f"{PEER} {policy}" for policy in PEER_POLICIES))
NOISE = 0.03
"""What two runs of one router differ by on a busy machine of two cores, in hit rate and time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a session says next, and how long it thinks before."""

    new: list[int]
    think_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """One router's figures of one trace."""

    seconds: float
    processor: float
    """Seconds of processor time that the engines took: what a busy machine spoils least."""
    cached: float
    """Cached by all prompt tokens, as the engines count them."""


Trace = list[list[Turn]]


def trace(seed: int, sessions: int, turns: int) -> Trace:
    """Sessions of a heavy tail: how much a turn adds is drawn once for each, log-uniformly."""
    draw = random.Random(seed)
    system = [draw.choice(VOCABULARY) for _ in range(SYSTEM)]
    made: Trace = []
    for _ in range(sessions):
        size = round(NEW[0] * (NEW[1] / NEW[0]) ** draw.random())
        said = [[draw.choice(VOCABULARY) for _ in range(size)] for _ in range(turns)]
        said[0] = system + said[0]
        made.append([Turn(new, draw.expovariate(1 / THINK_S)) for new in said])
    return made


def tokens_of(made: Trace) -> int:
    """Of all contexts in the end, the common prompt once."""
    return sum(len(turn.new) + ANSWER for turns in made for turn in turns) - SYSTEM * (len(made) - 1)


async def play(fleet: Fleet, made: Trace, name: str) -> float:
    """Seconds until every session has had all its turns."""

    async def session(index: int, turns: Sequence[Turn]) -> None:
        context: list[int] = []
        for turn in turns:
            await asyncio.sleep(turn.think_s)
            context += turn.new
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, detokenize=False, seed=index)
            (sample,) = await fleet.sample(context, 1, params, session_id=f"{name}-{index}")
            context += sample.token_ids

    began = time.perf_counter()
    await asyncio.gather(*(session(i, turns) for i, turns in enumerate(made)))
    return time.perf_counter() - began


async def prefix_tokens(urls: Sequence[str]) -> tuple[float, float]:
    """Prompt tokens that were looked for in the engines' prefix caches, and found."""
    found: dict[str, float] = defaultdict(float)
    for url in urls:
        http = HttpTransport(url)
        for line in (await http.call("GET", "/metrics", None, timeout_s=10)).decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series.startswith("vllm:prefix_cache_"):
                found[series.partition("{")[0]] += float(value)
        await http.close()
    return found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]


def processor_seconds() -> float:
    """That the engines have taken since they started, with all their threads and processes."""
    servers = [p for p in psutil.Process().children() if "penstock.plugin.server" in p.cmdline()]
    times = [p.cpu_times() for server in servers for p in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def measure(urls: Sequence[str], side: str, made: Trace, name: str) -> Round:
    """One router, started anew, over engines that remember nothing."""
    peer, _, policy = side.rpartition(" ")
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"policy": policy}
        if peer:
            router = stack.enter_context(_routers.peer(peer, (), "--policy", policy))
            options = {"kind": PEER, "url": f"http://127.0.0.1:{router.port}"}
        fleet = await stack.enter_async_context(Fleet.connect(urls, api_key=_engine_key.key(), **options))
        await fleet.reset_prefix_cache()
        queries, hits = await prefix_tokens(urls)
        processor = processor_seconds()
        seconds = await play(fleet, made, name)
        processor = processor_seconds() - processor
        queries_then, hits_then = await prefix_tokens(urls)
    return Round(seconds, processor, (hits_then - hits) / (queries_then - queries))


def rows(figures: dict[str, list[Round]], what: str) -> list[_common.Row]:
    """Ours by each peer's, medians over the rounds; of vllm-router each figure is that of its best policy."""
    made: list[_common.Row] = []
    for field, unit, best in (
        ("cached", "cached by prompt tokens", max),
        ("seconds", "seconds", min),
        ("processor", "processor seconds of the engines", min),
    ):
        median = {side: statistics.median(getattr(r, field) for r in rounds) for side, rounds in figures.items()}
        theirs = best((side for side in figures if side.startswith("vllm-router")), key=median.__getitem__)
        for peer, slack in (("round-robin", 0.0), (theirs, NOISE)):
            want, bar = ("at least", 1 - slack) if best is max else ("at most", 1 + slack)
            case = f"{what}: {unit}, {OURS} by {peer}"
            made.append(_common.compare(case, median[OURS], median[peer], bar=bar, want=want))
    return made


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--sessions", type=int, default=24)
    options.add_argument("--turns", type=int, default=6)
    args = options.parse_args()
    rounds = 1 if args.quick else args.rounds
    traces = [trace(seed, args.sessions, args.turns) for seed in range(rounds)]
    largest = max(tokens_of(made) for made in traces)
    kv_tokens = round(largest / KV_SHARE / 2)
    figures: dict[str, list[Round]] = {side: [] for side in SIDES}
    async with Fleet.launch(
        str(MODEL),
        2,
        profile="cpu",
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=kv_tokens * KV_TOKEN_BYTES,
        extra_args={"hf-overrides": f'{{"max_position_embeddings": {MAX_MODEL_LEN}}}'},
    ) as launched:
        _engine_key.share(launched)
        urls = [engine.url for engine in await launched.engines()]
        await measure(urls, "round-robin", traces[0][:4], "warm-up")
        for number, made in enumerate(traces):
            sides = list(SIDES)
            random.Random(number).shuffle(sides)
            for side in sides:
                figures[side].append(await measure(urls, side, made, f"r{number}"))
                last = figures[side][-1]
                spent = f"{last.seconds:.2f} s, {last.processor:.2f} s of processor time"
                _common.note(f"round {number + 1}, {side}: {spent}, {last.cached:.3f} of the prompts cached")
    what = f"{args.sessions} sessions of {args.turns} turns, 2 engines of {kv_tokens} KV tokens"
    return _common.report("routing_real", rows(figures, what))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
