"""What the fleet and its router cost: tokens/s through them against straight to the same engines, interleaved.

python benchmarks/fleet_tax.py [--engines 2] [--profile cpu] [--model PATH] [--rounds 7]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import _common

from penstock.engine.data import DataClient
from penstock.fleet.fleet import Fleet
from penstock.types import Sample, SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
TOKENS = 128
BAR = 0.97

Ask = Callable[[int, SamplingParams], Awaitable[list[Sample]]]


async def throughput(ask: Ask, concurrent: int, requests: int, seed: int) -> float:
    """Tokens/s of `requests` requests, `concurrent` at a time; closed loop."""
    left = iter(range(requests))

    async def worker() -> int:
        tokens = 0
        for i in left:
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, seed=seed + i)
            tokens += sum(len(sample.token_ids) for sample in await ask(i, params))
        return tokens

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(worker() for _ in range(concurrent))))
    return tokens / (time.perf_counter() - began)


async def measure(fleet: Fleet, rounds: int) -> list[_common.Row]:
    """Both sides, turn by turn, on the same engines with the same requests."""
    direct = [DataClient(engine.url) for engine in await fleet.engines()]

    async def through(i: int, params: SamplingParams) -> list[Sample]:
        return await fleet.sample([5 + i % 80, 6, 7], 1, params)

    async def straight(i: int, params: SamplingParams) -> list[Sample]:
        return await direct[i % len(direct)].sample([5 + i % 80, 6, 7], 1, params)

    rows: list[_common.Row] = []
    for concurrent in (64, 256):
        await throughput(through, concurrent, concurrent, 0)  # warm up
        await throughput(straight, concurrent, concurrent, 0)
        ours, theirs = [], []
        for i in range(rounds):
            sides = [(through, ours), (straight, theirs)]
            for ask, figures in sides if i % 2 else reversed(sides):
                figures.append(await throughput(ask, concurrent, max(512, 2 * concurrent), 1000 * i))
            _common.note(f"{concurrent} concurrent, round {i + 1}: {ours[-1]:.0f} and {theirs[-1]:.0f} tokens/s")
        case = f"{concurrent} concurrent, {len(direct)} engines, {TOKENS} tokens each, tokens/s"
        # Every round makes the same number of tokens, so the harmonic mean is all tokens by all seconds.
        mine, peers = statistics.harmonic_mean(ours), statistics.harmonic_mean(theirs)
        rows.append(_common.compare(case, mine, peers, bar=BAR, want="at least"))
    for client in direct:
        await client.close()
    return rows


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--profile", default="cpu")
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--rounds", type=int, default=7)
    args = options.parse_args()
    async with Fleet.launch(
        args.model, args.engines, profile=args.profile, max_model_len=256, max_num_seqs=256
    ) as fleet:
        return _common.report("fleet_tax", await measure(fleet, 1 if args.quick else args.rounds))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
