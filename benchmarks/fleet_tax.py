"""What the fleet and its router cost: tokens/s through them against straight to the same engines, interleaved.

python benchmarks/fleet_tax.py [--engines 2] [--rounds 7]
python benchmarks/fleet_tax.py --profile gpu --model 0.6b --tokens 512 --scaling   on a GPU for each engine

A model by the name of a shape has weights that vLLM makes up. With `--scaling`, besides: all engines against one of
them, each with as many requests in flight, in which a CPU's cores that engines share would be what is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import _dummy_models

from penstock.engine.data import DataClient
from penstock.fleet.fleet import Fleet
from penstock.types import Sample, SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
PROMPT_ROOM = 128
BAR, SCALING_BAR = 0.97, 0.95
"""At least 3.8 times one engine with four."""
MANY = 16_384
"""A quarter of the tokens of a round, at least."""

Ask = Callable[[int, SamplingParams], Awaitable[list[Sample]]]


async def throughput(ask: Ask, concurrent: int, requests: int, seed: int, tokens: int) -> float:
    """Tokens/s of `requests` requests of `tokens` tokens, `concurrent` at a time; closed loop."""
    left = iter(range(requests))

    async def worker() -> int:
        made = 0
        for i in left:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=seed + i)
            made += sum(len(sample.token_ids) for sample in await ask(i, params))
        return made

    began = time.perf_counter()
    made = sum(await asyncio.gather(*(worker() for _ in range(concurrent))))
    return made / (time.perf_counter() - began)


def through(fleet: Fleet) -> Ask:
    """By the fleet's router."""

    async def ask(i: int, params: SamplingParams) -> list[Sample]:
        return await fleet.sample([5 + i % 80, 6, 7], 1, params)

    return ask


def straight(engines: Sequence[DataClient]) -> Ask:
    """To one after the other."""

    async def ask(i: int, params: SamplingParams) -> list[Sample]:
        return await engines[i % len(engines)].sample([5 + i % 80, 6, 7], 1, params)

    return ask


async def measure(args: Any, fleet: Fleet) -> list[_common.Row]:
    """Both sides, turn by turn, on the same engines with the same requests."""
    direct = [DataClient(engine.url) for engine in await fleet.engines()]

    rows: list[_common.Row] = []
    for concurrent in (64, 256):
        sides = {through(fleet): concurrent, straight(direct): concurrent}
        case = f"{concurrent} concurrent, {len(direct)} engines, {args.tokens} tokens each, tokens/s"
        rows.append(_common.compare(case, *await turns(args, sides), bar=BAR, want="at least"))
    if args.scaling and len(direct) > 1:
        async with Fleet.connect([(await fleet.engines())[0].url]) as one:
            sides = {through(one): 128, straight(direct[:1]): 128}
            case = f"128 concurrent, 1 engine, {args.tokens} tokens each, tokens/s"
            rows.append(_common.compare(case, *await turns(args, sides), bar=BAR, want="at least"))
            for each in (64, 128):
                sides = {through(fleet): each * len(direct), through(one): each}
                case = f"{each} concurrent at each engine, {len(direct)} engines against one, tokens/s"
                bar = SCALING_BAR * len(direct)
                rows.append(_common.compare(case, *await turns(args, sides), bar=bar, want="at least"))
    for client in direct:
        await client.close()
    return rows


async def turns(args: Any, sides: Mapping[Ask, int]) -> list[float]:
    """Tokens/s of each side with so many requests at a time, in rounds that change their order."""
    for ask, concurrent in sides.items():
        await throughput(ask, concurrent, concurrent, 0, args.tokens)  # warm up
    figures: dict[Ask, list[float]] = {ask: [] for ask in sides}
    for i in range(args.rounds):
        for ask, concurrent in list(sides.items())[:: 1 if i % 2 else -1]:
            requests = max(4 * MANY // args.tokens, 2 * concurrent)
            figures[ask].append(await throughput(ask, concurrent, requests, 1000 * i, args.tokens))
        _common.note(f"{list(sides.values())} concurrent, round {i + 1}: {[round(of[-1]) for of in figures.values()]}")
    # Every round makes the same number of tokens, so the harmonic mean is all tokens by all seconds.
    return [statistics.harmonic_mean(of) for of in figures.values()]


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--profile", default="cpu")
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--tokens", type=int, default=128, help="of each answer")
    options.add_argument("--scaling", action="store_true", help="also all engines against one")
    args = options.parse_args()
    if args.quick:
        args.rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        made_up = args.model in _dummy_models.SHAPES
        async with Fleet.launch(
            _dummy_models.save(Path(folder), args.model) if made_up else args.model, args.engines,
            profile=args.profile, load_format="dummy" if made_up else "auto", max_num_seqs=256,
            max_model_len=args.tokens + PROMPT_ROOM,
        ) as fleet:  # fmt: skip
            return _common.report("fleet_tax", await measure(args, fleet))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
