"""Twenty weight updates under load on real CPU engines: how long no token is made, and whether one is lost.

    python benchmarks/update_cpu.py [--engines 2] [--concurrent 64] [--updates 20]

A token is wasted when an engine made it and no caller got it: the engines' own counter against what arrived.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from pathlib import Path

import _common
import torch
from transformers import AutoModelForCausalLM

from penstock.fleet.fleet import Fleet
from penstock.types import SamplingParams, UpdateReport

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
TOKENS = 128
BUBBLE_BAR_S = 0.060


async def load(fleet: Fleet, concurrent: int, stop: asyncio.Event) -> int:
    """Requests without a pause until told to stop; returns the tokens received."""

    async def worker(w: int) -> int:
        tokens = 0
        while not stop.is_set():
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            tokens += sum(len(s.token_ids) for s in await fleet.sample([5 + w % 80, 6, 7], 1, params))
        return tokens

    return sum(await asyncio.gather(*(worker(w) for w in range(concurrent))))


async def made(fleet: Fleet) -> int:
    """Tokens that the engines count as generated."""
    return sum(engine.stats.generation_tokens for engine in await fleet.engines() if engine.stats is not None)


async def measure(fleet: Fleet, concurrent: int, updates: int) -> list[_common.Row]:
    """The updates, one after another, while `concurrent` requests are in flight."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = await made(fleet)
    stop = asyncio.Event()
    requests = asyncio.create_task(load(fleet, concurrent, stop))
    await asyncio.sleep(2.0)
    reports: list[UpdateReport] = []
    for i in range(updates):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-4)
        report = await fleet.update_weights(model.named_parameters())
        phases = ", ".join(f"{k} {1000 * v:.0f}" for k, v in report.engines[0].seconds.items())
        _common.note(f"update {i + 1}: bubble {1000 * report.bubble:.0f} ms ({phases})")
        reports.append(report)
        await asyncio.sleep(0.3)
    stop.set()
    received = await requests
    wasted = await made(fleet) - before - received
    bubbles = [report.bubble for report in reports]
    name = f"{concurrent} in flight, {updates} updates"
    return [
        _common.single(f"{name}: bubble median, s", statistics.median(bubbles), bar=BUBBLE_BAR_S, want="at most"),
        _common.single(f"{name}: bubble max, s", max(bubbles), bar=10 * BUBBLE_BAR_S, want="at most"),
        _common.single(f"{name}: wasted tokens of {received}", wasted, bar=0, want="at most"),
    ]


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--concurrent", type=int, nargs="+", default=[64, 256])
    options.add_argument("--updates", type=int, default=20)
    args = options.parse_args()
    rows: list[_common.Row] = []
    async with Fleet.launch(MODEL, args.engines, profile="cpu", max_model_len=256, max_num_seqs=256) as fleet:
        await fleet.sample([5, 6, 7], 4, SamplingParams(max_tokens=8))  # the first request warms kernels up
        for concurrent in args.concurrent:
            rows += await measure(fleet, concurrent, 3 if args.quick else args.updates)
    return _common.report("update_cpu", rows)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
