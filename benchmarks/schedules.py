"""Schedules beside each other: samples a second under heavy-tailed lengths, and wall time to a fixed reward.

    python benchmarks/schedules.py --profile gpu --size 1.7b --eager --results FILE    two GPUs: engine and learner
    python benchmarks/schedules.py --profile gpu --size 1.7b --eager --schedules colocated --results FILE    one GPU
    python benchmarks/schedules.py --profile gpu --to-reward 0.5 --seeds 0 1 2 --results FILE    the sorter learns
    python benchmarks/schedules.py --quick                                        simulated engines

Every run starts from the same weights, samples without seeds and writes no checkpoint; the engines stay up between
runs. A short run comes first and counts for none: it bears the compilation of kernels. `--results` keeps a line for
each run, so that seeds can be added later; the rows are medians over all of its lines.

Rates leave out the first step, and the last `--max-staleness` + 1: `async` fills its pipeline in the one and submits
nothing new in the others. The same steps are left out of every schedule.

Lengths are drawn from a Pareto distribution by the prompt, so each schedule makes the same ones: most are short, a few
reach `--max-tokens`. With `--size` the model has random weights in the layers of that Qwen3, prompts are some 200
tokens long, and the reward is the share of even token ids, which such a model learns in a few steps. The longest
response of a batch then takes some three times as long as the learner.

With `--to-reward` the policy decides its lengths, and a run ends when the mean reward of its last `WINDOW` steps is
there: training rewards, so that no evaluation stands between the steps.

Bars: `async` makes at least 1.6 times the samples a second of `sync`, and `one_step_off` at least as many as `sync`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _common
import _dummy_models
import torch
from _common import Row

from penstock.config import RunConfig
from penstock.fleet.fleet import Fleet
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, package_versions
from penstock.rollout.environment import Task, load_environment
from penstock.rollout.episodes import SingleTurnGenerator
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.train.grpo import Trainee
from penstock.train.interface import Learner
from penstock.train.learner import LocalLearner
from penstock.train.scenarios.table import BASE, MODEL, SIM
from penstock.train.schedules import check_schedule
from penstock.train.trainer import train
from penstock.types import Sample, SamplingParams

TAIL = 1.2
"""Exponent of the Pareto distribution: the mean exists, the variance does not."""
ASYNC_BAR, ONE_STEP_BAR = 1.6, 1.0
BEGAN = time.monotonic()
LONG_PROMPTS = {"min_numbers": 60, "max_numbers": 80}
MOST_PROMPT = 256
WARM_UP = -1
"""Seed of the run that is not measured, and its name; it has 2 steps."""
UNREACHED_S = 3600.0
"""Stands for the time of a run that ended before its reward."""
WINDOW = 5
"""Steps over which a reward is averaged."""


class Unsaved(Trainee):
    """Leaves the state of learner and optimiser out of checkpoints: gigabytes that no run takes up again."""

    def save(self, folder: Path) -> Mapping[str, Any]:
        """See `Trainee.save`."""
        del folder
        return {}


class ReachedError(Exception):
    """The reward is reached: it ends a run."""


class Progress(Reporter):
    """Says on stderr when each part of a run ended, in seconds since the benchmark began."""

    def __init__(self, name: str, began: float, target: float | None = None) -> None:
        self._name, self._began, self._target = name, began, target
        self.rewards: list[float] = []
        self.seconds = 0.0

    def on_phase(self, name: str) -> None:
        """See `Reporter`."""
        _common.note(f"{time.monotonic() - self._began:7.1f} s {self._name}: {name}")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """See `Reporter`."""
        self.rewards.append(metrics["reward_mean"])
        self.seconds += metrics["seconds/step"]
        took = f"{metrics['seconds/step']:.1f} s, {metrics['seconds/training']:.1f} s of it training"
        self.on_phase(f"step {metrics['step']:.0f} took {took}; reward {self.rewards[-1]:.3f}")
        last = self.rewards[-WINDOW:]
        if self._target is not None and len(last) == WINDOW and statistics.fmean(last) >= self._target:
            raise ReachedError


class HeavyTailed(SingleTurnGenerator):
    """Responses of lengths that the prompt alone decides."""

    async def _sample(self, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        if params.temperature:  # evaluations are left alone
            length = heavy_tailed(repr(list(prompt_ids)), params.max_tokens)
            # Seeds belong to `sync` alone, and vLLM draws for seeded requests one by one.
            params = replace(params, max_tokens=length, ignore_eos=True, seed=None)
        return await super()._sample(prompt_ids, n, params)


class Ids(Tokenizer):
    """Spells responses as their ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        del skip_special_tokens
        return " ".join(map(str, token_ids))


class Evens(HeavyTailed):
    """Rewards the share of even ids in a response; responses of evaluations are short, as nothing is made of them."""

    async def _sample(self, prompt_ids: Sequence[int], n: int, params: SamplingParams) -> list[Sample]:
        params = params if params.temperature else replace(params, max_tokens=1, ignore_eos=True)
        return await super()._sample(prompt_ids, n, params)

    def _reward(self, task: Task, text: str) -> float:
        del task
        return statistics.fmean(int(number) % 2 == 0 for number in text.split())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def heavy_tailed(name: str, most: int) -> int:
    """Length in tokens, from `most / 32` to `most`, of a Pareto distribution; a function of `name`."""
    draw = (_digest(name) + 1) / 2**64
    return min(most, max(1, math.ceil(most / 32 * draw ** (-1 / TAIL))))


def random_model(folder: Path, size: str) -> Path:
    """Write random weights in the layers of a Qwen3, with the sorter's tokenizer and vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - seconds

    path, tokenizer = _dummy_models.save(folder, size), AutoTokenizer.from_pretrained(MODEL)
    config = AutoConfig.from_pretrained(path)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def config_of(given: argparse.Namespace, schedule: str, seed: int, folder: Path) -> RunConfig:
    """The configuration of one run."""
    steps = 2 if seed == WARM_UP else given.steps
    tree: dict[str, Any] = {section: dict(keys) for section, keys in BASE.items()}
    tree |= {"name": f"{schedule}-{seed}", "seed": max(seed, 0), "run_dir": folder}
    room = MOST_PROMPT if given.size else 64
    tree["engine"] |= {"model": str(given.model), "profile": given.profile, "max_model_len": given.max_tokens + room}
    tree["engine"]["enforce_eager"] = given.eager
    if given.size:
        samples = given.groups * tree["rollout"]["group_size"] * (given.max_staleness + 1)
        tree["engine"] |= {"dtype": "auto" if given.profile == "gpu" else "float32", "max_num_seqs": samples}
        tree["environment"] = {**tree["environment"], "options": {**tree["environment"]["options"], **LONG_PROMPTS}}
    if schedule == "colocated":
        tree["engine"] |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4}
    if given.profile == "sim":
        tree["engine"]["extra_args"] = {**SIM, "tokens-per-second": given.sim_tokens_per_second}
    tree["fleet"] |= {"engines": given.engines}
    tree["rollout"] |= {"groups_per_batch": given.groups, "max_tokens": given.max_tokens}
    tree["train"] |= {
        "steps": steps, "schedule": schedule, "max_staleness": given.max_staleness,
        "checkpoint_every": steps, "dtype": "auto", "micro_batch_tokens": 8_192 if given.size else 16_384,
        "learning_rate": given.learning_rate,
    }  # fmt: skip
    tree["eval"] = {"size": 1}
    return RunConfig.model_validate(tree)


async def one_run(config: RunConfig, fleet: Fleet, learner: Learner, given: argparse.Namespace) -> dict[str, Any]:
    """Train once on engines that are up; the learner starts from the model, under the engines' next version."""
    if fleet.weight_version:
        learner.versions[None] = fleet.weight_version + 1
    environment = load_environment(config.environment, config.seed)
    params = SamplingParams(max_tokens=config.rollout.max_tokens)
    target = None if config.name.endswith(f"-{WARM_UP}") else given.to_reward
    tokenizer = load_tokenizer(str(config.engine.model))
    tokenizer = Ids(tokenizer.huggingface) if given.size else tokenizer
    generator = SingleTurnGenerator if given.to_reward is not None else Evens if given.size else HeavyTailed
    folder, progress = RunFolder.create(config.run_dir / config.name, config), Progress(config.name, BEGAN, target)

    async def loads() -> Mapping[str, int]:
        return {engine.name: engine.outstanding for engine in (await fleet.router_admin.engines()).engines}

    reached = False
    try:
        await train(
            config,
            fleet,
            trainee=Unsaved(learner, config.train, 1.0, config.rollout.max_tokens),
            generator=generator(fleet, tokenizer, environment, params, 4096),
            environment=environment,
            folder=folder,
            reporter=progress,
            loads=loads,
        )
    except ReachedError:
        reached = True
    rows = folder.metrics()
    inner = full_steps(rows, given.max_staleness)
    spent = sum(row["seconds/step"] for row in inner)
    return {
        "schedule": config.train.schedule,
        "seed": config.seed,
        "samples_per_second": sum(row["samples"] for row in inner) / spent,
        "tokens_per_second": sum(row["tokens"] for row in inner) / spent,
        "training_share": sum(row["seconds/training"] for row in inner) / spent,
        "idle_learner": statistics.fmean(row["idle/learner"] for row in inner),
        "idle_engines": statistics.fmean(row.get("idle/engines", 0.0) for row in inner),
        "tokens_lost": sum(row.get("update/tokens_lost", 0.0) for row in rows),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in rows),
        "target": given.to_reward,
        "seconds_to_target": progress.seconds if reached else None,
        "steps": len(rows),
        "rewards": [round(reward, 3) for reward in progress.rewards],
    }


def full_steps(rows: Sequence[Mapping[str, Any]], max_staleness: int) -> Sequence[Mapping[str, Any]]:
    """Leave out the step that fills the pipeline of `async`, and those that drain it."""
    return rows[1 : -max_staleness - 1] or rows[1:-1] or rows


def layout_of(schedule: str, engines: int) -> dict[str, Any]:
    """The GPUs of a schedule, and how engines and learner share them."""
    if schedule == "colocated":
        return {"gpus": engines, "layout": "learner and engine take turns on one GPU; the engine has 40% of its memory"}
    return {"gpus": engines + 1, "layout": "the learner has a GPU of its own"}


async def measure(given: argparse.Namespace, folder: Path, results: Path) -> None:
    """All schedules that share one layout, seed by seed; each run is written as it ends."""
    first = config_of(given, given.schedules[0], given.seeds[0], folder)
    check_schedule(first)
    async with Fleet.launch(first.engine, fleet=first.fleet, router=first.router) as fleet:
        runs = itertools.product(given.seeds, given.schedules)
        for seed, schedule in itertools.chain([(WARM_UP, given.schedules[0])], runs):
            config = config_of(given, schedule, seed, folder)
            found = await one_run(config, fleet, await asyncio.to_thread(learner_of, config), given)
            if seed == WARM_UP:
                continue
            found |= {"profile": given.profile, "model": given.size or given.model.name}
            found |= layout_of(schedule, given.engines)
            found |= {"max_tokens": given.max_tokens, "groups": given.groups, "max_staleness": given.max_staleness}
            found |= {"machine": _common.machine(), "versions": package_versions()}
            _common.note(json.dumps(found))
            with results.open("a") as out:
                out.write(json.dumps(found) + "\n")


def learner_of(config: RunConfig) -> Learner:
    """A learner that has just loaded the model."""
    gc.collect()
    return LocalLearner(config.engine.model, config.train, seed=config.seed, served_dtype=config.engine.dtype)


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Compare the schedules of all runs for each GPU: samples a second, and the time to a reward."""
    rates, times = dict[str, list[float]](), dict[str, list[float]]()
    for run in runs:
        if run["target"] is None:
            rates.setdefault(run["schedule"], []).append(run["samples_per_second"] / run["gpus"])
        else:
            times.setdefault(run["schedule"], []).append(run["seconds_to_target"] or UNREACHED_S)
    rows: list[Row] = []
    bars = {"async": ASYNC_BAR, "one_step_off": ONE_STEP_BAR, "colocated": 0.0}
    for schedule, bar in bars.items():
        if schedule in rates and "sync" in rates:
            ours, peer = (statistics.median(rates[name]) for name in (schedule, "sync"))
            rows.append(_common.compare(f"{schedule}, samples/s a GPU by sync", ours, peer, bar=bar, want="at least"))
    for schedule, found in times.items():
        on = " on one GPU" if schedule == "colocated" else ""
        case = f"{schedule}{on}, s to the reward, {len(found)} seeds"
        rows.append(_common.single(case, statistics.median(found), bar=UNREACHED_S - 1, want="at most"))
    return rows


def main() -> int:
    """Measure, and print the document."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--profile", choices=("sim", "cpu", "gpu"), default="sim")
    options.add_argument("--schedules", nargs="+", default=["sync", "async", "one_step_off"])
    options.add_argument("--seeds", nargs="+", type=int, default=[0])
    options.add_argument("--model", type=Path, default=MODEL, help="folder of a sorter")
    options.add_argument("--size", choices=sorted(_dummy_models.SHAPES), help="random weights of this shape instead")
    options.add_argument("--eager", action="store_true", help="engines start sooner and generate more slowly")
    options.add_argument("--learning-rate", type=float, help="default: 2e-4, with --size 5e-6")
    options.add_argument("--engines", type=int, default=1)
    options.add_argument("--steps", type=int, default=14)
    options.add_argument("--groups", type=int, help="of 8 samples, in each step; default: 64, with --size 16")
    options.add_argument("--max-tokens", type=int, default=256)
    options.add_argument("--max-staleness", type=int, default=2, help="of async, in versions")
    options.add_argument("--sim-tokens-per-second", type=float, default=200.0, help="of each request")
    options.add_argument("--to-reward", type=float, help="end a run there; --steps bounds it")
    options.add_argument("--results", type=Path)
    given = options.parse_args()
    given.groups = given.groups or (16 if given.size else 64)
    given.learning_rate = given.learning_rate or (5e-6 if given.size else 2e-4)
    if given.quick:
        given.steps, given.groups, given.max_tokens = 4, 4, 64
    if "colocated" in given.schedules and len(given.schedules) > 1:
        options.error("colocated has another layout than the others: measure it by itself, into the same --results")
    with tempfile.TemporaryDirectory() as scratch:
        if given.size:
            given.model = random_model(Path(scratch), given.size)
        results = given.results or Path(scratch) / "results.jsonl"
        asyncio.run(measure(given, Path(scratch), results))
        runs = [json.loads(line) for line in results.read_text().splitlines()]
    return _common.report("schedules", rows_of(runs), runs=runs)


if __name__ == "__main__":
    sys.exit(main())
