"""Quantised engines beside one that is not: tokens a second, and how far their logprobs are from a learner's in floats.

    python benchmarks/quantised.py --profile gpu --size 1.7b --kinds none fp8 int8    random weights, one GPU
    python benchmarks/quantised.py                                                    the sorter on a CPU, in int8

One engine after another; each answers the same prompts once unmeasured and `--rounds` times measured, all at once.
The gap is the mean |learner - engine logprob| over the tokens of the last round, in nats, at equal weights.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _common
import _dummy_models
import schedules
import torch
from _common import Row

from penstock.aio import all_or_first_error
from penstock.config import TrainConfig
from penstock.fleet.fleet import Fleet
from penstock.settings import EngineConfig, FleetConfig
from penstock.train.interface import Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.types import Sample, SamplingParams

PROMPT = 32
"""Tokens of each prompt, drawn at random from those of the sorter's tokenizer that are text."""
NONE = "none"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Of engines on GPUs: a graph of the whole decode step, which waits for no launches, without minutes of compilation."""


async def measure(given: argparse.Namespace, kind: str, prompts: Sequence[Sequence[int]]) -> tuple[float, list[Sample]]:
    """Return the median of tokens a second of one engine, and the samples of its last round."""
    keys: dict[str, Any] = {"model": str(given.model), "profile": given.profile}
    if given.profile == "gpu":
        keys["extra_args"] = {"compilation-config": json.dumps({**GRAPHS, "cudagraph_capture_sizes": [len(prompts)]})}
    dtype = "bfloat16" if given.profile == "gpu" else "float32"
    keys |= {"dtype": dtype, "max_model_len": PROMPT + given.tokens, "gpu_memory_utilization": 0.4}
    config = EngineConfig(**keys, max_num_seqs=len(prompts), quantization=None if kind == NONE else kind)
    params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
    rates: list[float] = []
    async with Fleet.launch(config, fleet=FleetConfig(engines=1)) as fleet:
        for _ in range(given.rounds + 1):
            began = time.monotonic()
            answers = await all_or_first_error(fleet.sample(prompt, 1, params) for prompt in prompts)
            samples = [sample for made in answers for sample in made]
            rates.append(sum(len(sample.token_ids) for sample in samples) / (time.monotonic() - began))
            _common.note(f"{kind}: {rates[-1]:.0f} tokens/s")
    return statistics.median(rates[1:]), samples


def gap(given: argparse.Namespace, prompts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> float:
    """Mean |learner - engine logprob| of a learner in floats, in nats."""
    learner = LocalLearner(str(given.model), TrainConfig(dtype="float32", micro_batch_tokens=4096), seed=0)
    ids = [(*prompt, *sample.token_ids) for prompt, sample in zip(prompts, samples, strict=True)]
    before, made = (0.0,) * (PROMPT - 1), (1.0,) * given.tokens
    data = [Datum(row[:-1], row[1:], (*before, *made), (0.0,) * (len(row) - 1), (*before, *made)) for row in ids]
    ours = learner.forward(None, LossSpec({}), data).logprobs
    found = [
        (row[PROMPT - 1 :] - row.new_tensor(sample.logprobs)).abs() for row, sample in zip(ours, samples, strict=True)
    ]
    return float(torch.cat(found).mean())


def main() -> int:
    """Measure, and print the document."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--profile", choices=("cpu", "gpu"), default="cpu")
    options.add_argument("--kinds", nargs="+", choices=(NONE, "int8", "fp8"), default=[NONE, "int8"])
    options.add_argument("--model", type=Path, default=schedules.MODEL)
    options.add_argument("--size", choices=sorted(_dummy_models.SHAPES), help="random weights of this shape instead")
    options.add_argument("--requests", type=int, default=64, help="at once")
    options.add_argument("--tokens", type=int, default=128, help="of each answer")
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    if given.quick:
        given.requests, given.tokens, given.rounds = 8, 32, 1
    drawn = random.Random(0)
    prompts = [[drawn.randrange(3, 100) for _ in range(PROMPT)] for _ in range(given.requests)]
    rates, gaps = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        if given.size:
            given.model = schedules.random_model(Path(scratch), given.size)
        for kind in given.kinds:
            rates[kind], samples = asyncio.run(measure(given, kind, prompts))
            gaps[kind] = gap(given, prompts, samples)
            gc.collect()
            torch.cuda.empty_cache()
    return _common.report("quantised", rows_of(rates, gaps), tokens_per_second=rates, gaps=gaps)


def rows_of(rates: dict[str, float], gaps: dict[str, float]) -> list[Row]:
    """Speed by that of the engine that is not quantised, which has no bar, and the gap, below a trainer's alarm."""
    rows = [
        _common.compare(f"{kind}, tokens/s by unquantised", rates[kind], rates[NONE], bar=0.0, want="at least")
        for kind in rates
        if kind != NONE and NONE in rates
    ]
    for kind, found in gaps.items():
        bar = TrainConfig().logprob_alarm
        rows.append(_common.single(f"{kind}, mean |learner - engine| in nats", found, bar=bar, want="at most"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
