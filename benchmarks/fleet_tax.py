"""What the fleet and its router cost: tokens/s through them against straight to the same engines, interleaved.

python benchmarks/fleet_tax.py [--engines 2] [--rounds 7]
python benchmarks/fleet_tax.py --profile gpu --model 0.6b --tokens 512 --clients 8 --waves 6 --measure tax scaling
    on a GPU for each engine

Answers differ in length, as real ones do: of one length, all requests at an engine end at the same step, and it stands
still while its API server writes their answers.
A model by the name of a shape has weights that vLLM makes up. `scaling` is all engines against one of them, each with
as many requests in flight, in which a CPU's cores that engines share would be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import _dummy_models
import _engine_key
from _line_process import LineProcess

from penstock.fleet.fleet import Fleet

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
PROMPT_ROOM = 128
BAR, SCALING_BAR = 0.97, 0.95
"""At least 3.8 times one engine with four."""
MANY = 16_384
"""A quarter of the tokens of a round, at least."""
ROUND_S = 300.0


class Load:
    """Closed loops in several processes, that one process's own speed is not what is measured."""

    def __init__(self, clients: int, tokens: int, spread: float) -> None:
        argv = [sys.executable, str(Path(__file__).parent / "_sample_load.py")]
        self._clients = [LineProcess(argv) for _ in range(clients)]
        self._tokens = max(1, round(tokens * (1 - spread))), round(tokens * (1 + spread))
        self._least = 4 * MANY // tokens
        self._threads = ThreadPoolExecutor(clients)
        self.rounds: dict[str, list[list[float]]] = {}
        """Tokens/s of every round of every case, those of one side side by side."""

    async def throughput(self, side: Side, requests: int, seed: int) -> float:
        """Tokens/s of so many requests, all clients together, until the last one has its last answer."""
        share = len(self._clients)
        orders = [
            {
                "urls": side.urls, "tokens": self._tokens, "seed": seed + number * requests,
                "concurrent": _part(side.concurrent, number, share), "requests": _part(requests, number, share),
            }
            for number in range(share)
        ]  # fmt: skip
        began = time.perf_counter()
        asked = [(client.ask, json.dumps(order)) for client, order in zip(self._clients, orders, strict=True)]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(ROUND_S):
            made = await asyncio.gather(*(loop.run_in_executor(self._threads, ask, order) for ask, order in asked))
        return sum(map(int, made)) / (time.perf_counter() - began)

    async def turns(self, case: str, rounds: int, sides: Sequence[Side], waves: int) -> list[float]:
        """Tokens/s of each side, in rounds that change their order."""
        for side in sides:
            await self.throughput(side, side.concurrent, 0)  # warm up
        figures = self.rounds[case] = [[] for _ in sides]
        for i in range(rounds):
            for side, of in list(zip(sides, figures, strict=True))[:: 1 if i % 2 else -1]:
                requests = max(self._least, waves * side.concurrent)
                of.append(await self.throughput(side, requests, 1_000_000 * (i + 1)))
            concurrent = [side.concurrent for side in sides]
            _common.note(f"{concurrent} concurrent, round {i + 1}: {[round(of[-1]) for of in figures]}")
        # Rounds make about as many tokens each, so the harmonic mean is all tokens by all seconds.
        return [statistics.harmonic_mean(of) for of in figures]

    def close(self, *, at_once: bool) -> None:
        """End them; `at_once`, in the middle of a round."""
        for client in self._clients:
            if at_once:
                client.kill()
            client.close()
        self._threads.shutdown()


@dataclass(frozen=True)
class Side:
    """Where requests go, in turn, and how many at a time."""

    urls: list[str]
    concurrent: int


async def measure(args: Any, fleet: Fleet, load: Load, rows: list[_common.Row]) -> None:
    """Both sides, turn by turn, on the same engines with the same requests."""
    engines = [engine.url for engine in await fleet.engines()]

    async def row(case: str, ours: Side, peer: Side, bar: float) -> None:
        speeds = await load.turns(case, args.rounds, [ours, peer], args.waves)
        rows.append(_common.compare(case, *speeds, bar=bar, want="at least"))

    for concurrent in args.concurrent if "tax" in args.measure else ():
        case = f"{concurrent} concurrent, {len(engines)} engines, {args.tokens} tokens on average, tokens/s"
        await row(case, Side([fleet.url], concurrent), Side(engines, concurrent), BAR)
    if "scaling" in args.measure:
        async with Fleet.connect(engines[:1], api_key=_engine_key.key()) as one:
            case = f"128 concurrent, 1 engine, {args.tokens} tokens on average, tokens/s"
            await row(case, Side([one.url], 128), Side(engines[:1], 128), BAR)
            for each in args.each:
                case = f"{each} concurrent at each engine, {len(engines)} engines against one, tokens/s"
                sides = Side([fleet.url], each * len(engines)), Side([one.url], each)
                await row(case, *sides, SCALING_BAR * len(engines))


def _part(total: int, number: int, parts: int) -> int:
    return total // parts + (number < total % parts)


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--profile", default="cpu")
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    options.add_argument("--spread", type=float, default=0.5, help="share by which answers are shorter or longer")
    options.add_argument("--concurrent", type=int, nargs="+", default=[64, 256], help="requests in flight, for tax")
    options.add_argument("--clients", type=int, default=1, help="processes that make requests")
    options.add_argument("--measure", nargs="+", choices=("tax", "scaling"), default=["tax"])
    options.add_argument(
        "--waves", type=int, default=2,
        help="answers that each closed loop has in a round, at least: while the last ones end, engines have less to do "
        "than they could, and several do not end at the same moment",
    )  # fmt: skip
    options.add_argument("--each", type=int, nargs="+", default=[64, 128], help="requests at each engine, for scaling")
    args = options.parse_args()
    if "scaling" in args.measure and args.engines < 2:
        options.error(f"scaling is of two engines or more; --engines is {args.engines}")
    if not 0 <= args.spread < 1:
        options.error(f"--spread is a share, at least 0 and less than 1; it is {args.spread}")
    if args.quick:
        args.rounds = 1
    with tempfile.TemporaryDirectory() as folder:
        made_up = args.model in _dummy_models.SHAPES
        async with Fleet.launch(
            _dummy_models.save(Path(folder), args.model) if made_up else args.model, args.engines,
            profile=args.profile, load_format="dummy" if made_up else "auto", max_num_seqs=256,
            max_model_len=round(args.tokens * (1 + args.spread)) + PROMPT_ROOM,
        ) as fleet:  # fmt: skip
            _engine_key.share(fleet)
            load, rows = Load(args.clients, args.tokens, args.spread), list[_common.Row]()
            whole = False
            try:
                whole = await _common.until_ended(measure(args, fleet, load, rows))
            finally:
                load.close(at_once=not whole)
    return _common.report("fleet_tax", rows, rounds=load.rounds) or int(not whole)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
