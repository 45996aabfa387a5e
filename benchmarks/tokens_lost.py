"""Tokens that a weight update costs, by what happens to the KV cache, with streams of 1k to 4k tokens in flight.

    python benchmarks/tokens_lost.py --model 8b [--rounds 3] [--load 256]     one GPU, weights by CUDA IPC
    python benchmarks/tokens_lost.py --quick                                  a small model on a CPU, by shared memory

One engine; the modes take turns under the same load. Tokens lost are the engine's own count (`Fleet.recovered`): the
steady rate until the rate is back, minus the tokens made. Beside them stand what the clients saw: the streams' longest
silences, and the seconds until tokens came as fast as before.
"""
# pyright: basic

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import _common
import _dummy_models
import _engine_key
import torch
from weight_sync import GRAPHS, Load

from penstock.fleet.fleet import Fleet
from penstock.types import KV

BAR = 1 / 50
"""Of recompute's tokens lost, for requests in flight that keep their KV."""

Found = dict[str, dict[str, list[float]]]
"""`{mode: {figure: [of each round]}}`."""


async def measure(args: Any, fleet: Fleet, tensors: list[tuple[str, Any]], found: Found) -> None:
    """Rounds of every mode, turn by turn; the first round makes plans and caches."""
    _engine_key.share(fleet)
    urls = [engine.url for engine in await fleet.engines()]
    modes: list[KV] = list(get_args(KV))
    with closing(Load(urls, args.path, args.load)) as load:
        await load.ready()
        for number in range(args.rounds + 1):
            for mode in modes[:: 1 if number % 2 else -1]:
                await load.mark()
                report = await fleet.update_weights(tensors, kv=mode)
                figures = await load.gaps()
                report = await fleet.recovered(report)
                if report.tokens_lost is None:
                    raise _common.Unmeasured(f"{mode}: the engine measured no loss")
                figures |= {"tokens_lost": report.tokens_lost, "round": report.seconds["gate"]}
                _common.note(f"{mode}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
                for name, value in figures.items() if number else ():
                    found.setdefault(mode, {}).setdefault(name, []).append(value)


def rows(args: Any, found: Found) -> list[_common.Row]:
    """The new mode by recompute, on medians."""
    if not {"recompute", "keep_in_flight"} <= found.keys():
        return []
    kept, anew = (statistics.median(found[mode]["tokens_lost"]) for mode in ("keep_in_flight", "recompute"))
    case = f"{args.model}, {args.load} streams, tokens lost an update, KV kept in flight against recompute"
    return [_common.compare(case, kept, max(anew, 1.0), bar=BAR, want="at most")]


async def main() -> int:
    """Launch, measure, print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--model", choices=sorted(_dummy_models.SHAPES), default="0.6b")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load", type=int, default=256, help="requests in flight")
    options.add_argument("--logs", help="folder for the engine's log")
    options.add_argument("--memory", type=float, default=0.7, help="gpu_memory_utilization of the engine")
    args = options.parse_args()
    if args.quick:
        args.model, args.rounds, args.load = "nano", 1, 4
    on_gpu = torch.cuda.is_available()
    extra: dict[str, Any] = {}
    if on_gpu:
        extra = {"attention-backend": "FLASH_ATTN", "compilation-config": json.dumps(GRAPHS)}
    with tempfile.TemporaryDirectory() as folder:
        path = _dummy_models.save(Path(folder), args.model)
        args.path = str(path)
        launch = Fleet.launch(
            path, 1, profile="gpu" if on_gpu else "cpu", load_format="dummy", max_model_len=8192, max_num_seqs=256,
            gpu_memory_utilization=args.memory, weight_transport="cuda_ipc" if on_gpu else "shared_memory",
            log_dir=args.logs, extra_args=extra,
        )  # fmt: skip
        async with launch as fleet:
            device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
            shapes = _dummy_models.shapes(path)
            tensors = [(name, torch.randn(shape, device=device, dtype=dtype) * 0.02) for name, shape in shapes]
            found: Found = {}
            whole = await _common.until_ended(measure(args, fleet, tensors, found))
            status = _common.report("tokens_lost", rows(args, found), figures=found)
    return status or int(not whole)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
