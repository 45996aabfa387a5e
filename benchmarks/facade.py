"""`penstock.AsyncVLLM` against `torchrl.modules.llm.AsyncVLLM`: both blocking, vLLM's types in and out, CPU engines.

python benchmarks/facade.py [--peer-python PATH] [--model PATH] [--rounds 5]

tokens/s: a batch of 256 different prompts, 128 tokens each, over 2 replicas, the sides turn by turn in one run. spread:
the share of 500 prompts with one system prompt that went to the busier replica, each side with the balancer that it has
by default (even: 0.5).

TorchRL's class runs on CPU engines: Ray is told that there are GPUs. It wants an environment of its own:

    python -m venv peer                                          # with requirements/cpu.lock, as `make setup` does it
    peer/bin/pip install --no-deps torchrl==0.14.1 tensordict pyvers cloudpickle ray
    python benchmarks/facade.py --peer-python peer/bin/python    # or PENSTOCK_TORCHRL_PYTHON

Without it, ours alone is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import _common

HERE = Path(__file__).parent
MODEL = HERE.parent / "examples" / "models" / "sorter-0.8m"
REPLICAS = 2
BATCH, TOKENS = 256, 128
SHARED, SHARED_TOKENS = 500, 8
BAR = 1.0
"""Tokens/s, ours by TorchRL's: at least."""
SPREAD_BAR = 0.6
"""Share of the busier replica: at most, ours by itself, and ours by TorchRL's."""
START_S, ANSWER_S, END_S = 600.0, 600.0, 60.0


class Side:
    """One side in a process of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._process = process

    @classmethod
    async def start(cls, name: str, python: str, model: str) -> Side:
        """Return when its engines serve; what it prints besides goes to stderr."""
        argv = [python, str(HERE / "_facade_side.py"), name, model, str(REPLICAS)]
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=2**24,
            start_new_session=True,
        )
        side = cls(name, process)
        try:
            side.versions = (await side._line(START_S))["versions"]
        except BaseException:
            await side.close()
            raise
        return side

    async def generate(self, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
        """One batch; see `_facade_side.answer`."""
        if self._process.stdin is None:
            raise RuntimeError("a process started with pipes has them")
        order = {"prompts": prompts, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._line(ANSWER_S)

    async def close(self) -> None:
        """Let it end, and see that it does, with all that it started in its process group."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _line(self, deadline_s: float) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("a process started with pipes has them")
        async with asyncio.timeout(deadline_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side {self.name} has ended; what it printed above says why")
        return json.loads(line)


def batch(draw: random.Random) -> list[str]:
    """Prompts that the model was made for: numbers to sort."""
    return [f"<{' '.join(str(draw.randrange(10, 100)) for _ in range(8))}=" for _ in range(BATCH)]


def shared(draw: random.Random) -> list[str]:
    """One beginning of some 200 tokens, and each its own end."""
    system = " ".join(str(draw.randrange(10, 100)) for _ in range(66))
    return [f"{system} <{draw.randrange(10**6)}=" for _ in range(SHARED)]


async def measure(sides: Sequence[Side], rounds: int) -> dict[str, dict[str, float]]:
    """Of each side, tokens/s over all rounds and the share of its busier replica."""
    figures: dict[str, dict[str, list[float]]] = {side.name: {"rate": [], "share": []} for side in sides}
    for side in sides:
        await side.generate(batch(random.Random(0)), 16)  # warm up
    for number in range(rounds):
        draw = random.Random(number + 1)
        prompts, alike = batch(draw), shared(draw)
        for side in sides if number % 2 else reversed(sides):
            made = await side.generate(prompts, TOKENS)
            figures[side.name]["rate"].append(made["tokens"] / made["seconds"])
            spread = await side.generate(alike, SHARED_TOKENS)
            figures[side.name]["share"].append(max(spread["counts"]) / sum(spread["counts"]))
            rate, share = figures[side.name]["rate"][-1], figures[side.name]["share"][-1]
            _common.note(f"round {number + 1}, {side.name}: {rate:.0f} tokens/s, {share:.2f} on the busier replica")
    # Every round makes the same number of tokens, so the harmonic mean is all tokens by all seconds.
    return {
        name: {"rate": statistics.harmonic_mean(of["rate"]), "share": statistics.median(of["share"])}
        for name, of in figures.items()
    }


def rows(figures: dict[str, dict[str, float]], peer: str) -> list[_common.Row]:
    """Ours by the peer's, or ours alone."""
    rate = f"tokens/s, {BATCH} prompts of {TOKENS} tokens each, {REPLICAS} replicas"
    share = f"share of the busier of {REPLICAS} replicas, {SHARED} prompts with one system prompt"
    ours = figures["penstock"]
    made = [_common.single(share, ours["share"], bar=SPREAD_BAR, want="at most")]
    if "torchrl" not in figures:
        return [_common.single(f"{rate} (no peer)", ours["rate"], bar=0.0, want="at least"), *made]
    theirs = figures["torchrl"]
    return [
        _common.compare(f"{rate}; peer {peer}", ours["rate"], theirs["rate"], bar=BAR, want="at least"),
        _common.compare(f"{share}; peer {peer}", ours["share"], theirs["share"], bar=SPREAD_BAR, want="at most"),
        *made,
    ]


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--peer-python", default=os.environ.get("PENSTOCK_TORCHRL_PYTHON"))
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    sides: list[Side] = []
    try:
        sides.append(await Side.start("penstock", sys.executable, args.model))
        if args.peer_python:
            sides.append(await Side.start("torchrl", args.peer_python, args.model))
        else:
            _common.note("no --peer-python and no PENSTOCK_TORCHRL_PYTHON: TorchRL is missing, ours alone is measured")
        figures = await measure(sides, 1 if args.quick else args.rounds)
    finally:
        for side in sides:
            await side.close()
    peer = ", ".join(f"{name} {number}" for side in sides[1:] for name, number in side.versions.items())
    return _common.report("facade", rows(figures, peer))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
