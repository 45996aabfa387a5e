"""The discrete-event fleet against a real vLLM CPU engine: constants are fitted on some traces and checked on others.

Every run, real or simulated, is the same closed loop over the same trace. What is compared is the makespan on a quiet
machine: from the wall clock the time is taken off that the engine's core was ready to run and had no processor
(`/proc/PID/schedstat`), so that other work on the machine does not pass for the engine's.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import _common
import numpy as np

from fleet_sim.peers import PeerRouter
from fleet_sim.run import START_SPACING_S, FleetRun, FleetSetup
from fleet_sim.speed import EngineLimits, EngineSpeed
from fleet_sim.trace import AgentShape, GroupShape, Lengths, Trajectory, Turn, agents, groups
from penstock.engine.client import DataClient
from penstock.engine.command import server_command
from penstock.engine.control import ControlClient
from penstock.engine.launch import EngineProcess
from penstock.process import group_members
from penstock.settings import EngineConfig
from penstock.types import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
FILE = Path(__file__).parent / "calibration_cpu.json"
CONTEXT = 4096
KV_BYTES = 16 * 2**20
BAR = 0.1
FIRST_GUESS = EngineSpeed(4e-3, 2e-4, 5e-7, 5e-5, 1e-8, 2e-3)
TOKENS = (5, 95)
"""Ids that are neither special nor outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class Load:
    """A trace and how it is run."""

    name: str
    trace: Sequence[Trajectory]
    concurrency: int
    fitted: bool
    """Whether the constants are fitted to it; else it is a check."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a load took."""

    makespan_s: float
    """On a quiet machine."""
    wall_s: float
    hit_rate: float
    preemptions: int


def loads() -> list[Load]:
    """Steps of several batch sizes and contexts, prefills, and one agent trace to fit; two other traces to check."""

    def same(name: str, count: int, prompt: int, output: int) -> Load:
        trace = [Trajectory(i, (), (Turn(prompt, output),), session=False) for i in range(count)]
        return Load(name, trace, count, fitted=True)

    short = AgentShape(
        system_tokens=192, task=Lengths(80, 0.5, 300), turns=(3, 6), observation=Lengths(70, 0.7, 300),
        output=Lengths(50, 0.6, 200), tool_s=(0.2, 0.5), group_size=4,
    )  # fmt: skip
    long = AgentShape(
        system_tokens=320, task=Lengths(150, 0.5, 500), turns=(4, 8), observation=Lengths(110, 0.8, 500),
        output=Lengths(40, 0.7, 200), tool_s=(0.4, 0.6), group_size=4,
    )  # fmt: skip
    single = GroupShape(system_tokens=64, prompt=Lengths(150, 0.5, 500), output=Lengths(80, 0.8, 400), sizes=(4, 8, 16))
    return [
        same("decode alone", 1, 64, 192),
        same("decode 8, short", 8, 64, 192),
        same("decode 32, short", 32, 64, 160),
        same("decode 6, long", 6, 1100, 160),
        same("prefill, short prompts", 32, 60, 1),
        same("prefill, long prompts", 12, 1500, 1),
        Load("agents", agents(32, short, 11), 8, fitted=True),
        Load("check: other agents, KV pressed", agents(40, long, 12), 14, fitted=False),
        Load("check: groups", groups(128, single, 13), 32, fitted=False),
    ]


# --- the real engine --------------------------------------------------------------------------------------------------


class RealEngine:
    """A vLLM CPU engine and its clients."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.data = DataClient(process.url)
        self.control = ControlClient("calibrated", process.url)

    async def close(self) -> None:
        """Stop it."""
        await self.data.close()
        await self.control.http.close()
        await self.process.stop()

    async def measure(self, load: Load) -> Measured:
        """Run a load once from an empty cache."""
        await self.control.verbs.reset_prefix_cache()
        before, waits = await self.counters(), self._waits()
        began = time.perf_counter()
        supply = iter(load.trace)
        await asyncio.gather(*(self._worker(i, supply) for i in range(load.concurrency)))
        wall = time.perf_counter() - began
        after = await self.counters()
        busiest = max(self._waits().items(), key=lambda item: item[1][0] - waits.get(item[0], (0.0, 0.0))[0])
        waited = busiest[1][1] - waits[busiest[0]][1]
        queries, hits, preempted = (after[name] - before[name] for name in after)
        return Measured(wall - waited, wall, hits / queries, int(preempted))

    async def counters(self) -> dict[str, float]:
        """Prompt tokens looked up, found, and preemptions, since the start."""
        text = (await self.control.http.call("GET", "/metrics", None, timeout_s=10.0)).decode()
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total")
        lines = text.splitlines()
        return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names}

    async def kv_tokens(self) -> tuple[int, int]:
        """Tokens of KV, and of one block; vLLM keeps one block for itself."""
        text = (await self.control.http.call("GET", "/metrics", None, timeout_s=10.0)).decode()
        line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
        block, blocks = (int(re.findall(rf'[{{,]{name}="(\d+)"', line)[0]) for name in ("block_size", "num_gpu_blocks"))
        return (blocks - 1) * block, block

    def _waits(self) -> dict[int, tuple[float, float]]:
        """Of each of its processes the seconds on a processor and the seconds ready without one."""
        found: dict[int, tuple[float, float]] = {}
        for pid in group_members(self.process.pid):
            ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            found[pid] = int(ran) / 1e9, int(waited) / 1e9
        return found

    async def _worker(self, index: int, supply: Any) -> None:
        await asyncio.sleep(index * START_SPACING_S)
        for trajectory in supply:
            prompt = [token for key, count in trajectory.shared for token in _tokens(key, count)]
            for number, turn in enumerate(trajectory.turns):
                await asyncio.sleep(turn.delay_s)
                prompt += _tokens((trajectory.id, number), turn.new_tokens)
                params = SamplingParams(
                    max_tokens=turn.output_tokens, ignore_eos=True, detokenize=False, logprobs=False
                )
                (sample,) = await self.data.sample(prompt, 1, params)
                prompt += sample.token_ids


def _tokens(key: Hashable, count: int) -> list[int]:
    source = random.Random(str(key))
    return [source.randrange(*TOKENS) for _ in range(count)]


# --- the simulated one ------------------------------------------------------------------------------------------------


def simulate(load: Load, speed: EngineSpeed, limits: EngineLimits) -> tuple[float, float]:
    """Makespan in seconds and hit rate of the model."""
    figures = FleetRun(PeerRouter(), FleetSetup(1, load.concurrency, speed, limits), load.trace).run()
    return figures.makespan_s, figures.hit_rate


def fit(measured: Sequence[tuple[Load, Measured]], limits: EngineLimits) -> EngineSpeed:
    """Constants that bring the simulated makespans closest to the measured ones, by relative error and length.

    Gauss-Newton on the constants' logarithms, which keeps them positive, with steps held to a factor of two; a weak
    pull to the first guess settles what the loads leave open.
    """
    guess = np.log(np.array(astuple(FIRST_GUESS)))
    pull = 0.02
    weights = np.sqrt([m.makespan_s for _, m in measured])  # what chance does to a run averages out over its length
    theta = guess.copy()

    def residuals(at: Any) -> Any:
        speed = EngineSpeed(*map(float, np.exp(at)))
        off = [np.log(simulate(load, speed, limits)[0] / m.makespan_s) for load, m in measured]
        return np.concatenate([weights * np.array(off), pull * (at - guess)])

    for _ in range(12):
        base = residuals(theta)
        columns = [(residuals(theta + 0.05 * unit) - base) / 0.05 for unit in np.eye(len(theta))]
        step, *_ = np.linalg.lstsq(np.stack(columns, axis=1), -base, rcond=None)
        theta = theta + np.clip(step, -0.7, 0.7)
    return EngineSpeed(*(float(f"{value:.4g}") for value in np.exp(theta)))


# --- both -------------------------------------------------------------------------------------------------------------


async def calibrate(repeats: int) -> dict[str, Any]:
    """Measure every load `repeats` times, fit, and return the document that `FILE` keeps."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(_longer_model(Path(folder, "model"))), profile="cpu", max_model_len=CONTEXT, max_num_seqs=64,
            kv_cache_memory_bytes=KV_BYTES, extra_args={"max-num-batched-tokens": CONTEXT},
        )  # fmt: skip
        engine = RealEngine(await EngineProcess.launch(server_command(config), name="calibrated", log_dir=Path(folder)))
        try:
            kv_tokens, block = await engine.kv_tokens()
            measured = await _measure_all(engine, repeats)
        finally:
            await engine.close()
    limits = EngineLimits(kv_tokens, 64, CONTEXT, block, enable_chunked_prefill=False)
    speed = fit([(load, m) for load, m in measured if load.fitted], limits)
    return {
        "machine": _common.machine(),
        "versions": _common.package_versions(),
        "model": MODEL.name,
        "repeats": repeats,
        "speed": asdict(speed),
        "limits": asdict(limits),
        "measured": {load.name: asdict(m) for load, m in measured},
    }


async def _measure_all(engine: RealEngine, repeats: int) -> list[tuple[Load, Measured]]:
    every = loads()
    for load in every[:4]:
        await engine.measure(load)  # kernels and allocators warm up
    runs: dict[str, list[Measured]] = {load.name: [] for load in every}
    for i in range(repeats):
        for load in every if i % 2 == 0 else reversed(every):
            run = await engine.measure(load)
            runs[load.name].append(run)
            _common.note(f"{i + 1}: {load.name}: {run.makespan_s:.2f} s of {run.wall_s:.2f}, hits {run.hit_rate:.3f}")
    return [(load, _median(runs[load.name])) for load in every]


def _median(runs: Sequence[Measured]) -> Measured:
    makespan, wall, hits, preemptions = (statistics.median(values) for values in zip(*map(astuple, runs), strict=True))
    return Measured(round(makespan, 4), round(wall, 4), round(hits, 4), round(preemptions))


def _longer_model(folder: Path) -> Path:
    """The example model for longer contexts: its positions are rotary, so only its config says where they end."""
    shutil.copytree(MODEL, folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    return folder


def rows(document: dict[str, Any]) -> list[_common.Row]:
    """The model against the engine, for the traces that the constants were not fitted to."""
    speed, limits = EngineSpeed(**document["speed"]), EngineLimits(**document["limits"])
    made: list[_common.Row] = []
    for load in loads():
        if load.fitted:
            continue
        makespan, hit_rate = simulate(load, speed, limits)
        real = Measured(**document["measured"][load.name])
        for what, ours, peer in (("makespan, s", makespan, real.makespan_s), ("hit rate", hit_rate, real.hit_rate)):
            ratio = ours / peer
            case = f"calibration, {load.name}: simulated against real {what}"
            made.append(_common.Row(case, ours, peer, ratio, BAR, abs(ratio - 1) <= BAR))
    return made
