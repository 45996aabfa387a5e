"""Routing policies on the discrete-event fleet: ours and models of peers, the same traces and seeds for all.

    python benchmarks/policies.py [--seeds 8] [--plot FILE.png]     13 minutes on two cores
    python benchmarks/policies.py --quick                           8 engines, 2 seeds
    python benchmarks/policies.py --calibrate                       measure a real vLLM CPU engine anew (6 minutes)

Seven scenarios on 8 and 128 engines. Tokens/s is the whole batch by the time until its last trajectory is done; p99 is
of a trajectory's time from its start to its end, waiting included. A policy is within noise of another where the 95%
interval of their mean ratio over the seeds (paired: a seed is one trace) reaches 1, or the difference is under 2%.

The model of an engine is calibrated on vLLM's CPU build, `calibration_cpu.json`, and checked on traces that it was not
fitted to; `--calibrate` needs a machine that is otherwise idle. What the cells assume of a GPU is in the document.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import _calibration
import _common
from _policy_cells import ASSUMPTIONS, GPU_LIMITS, GPU_SPEED, OURS, Cell, cells, routers

from fleet_sim.run import FleetFigures

SIZES = {8: 3.0, 128: 1.25}
"""Engines, and how many trajectories there are for each that is under way."""
HASHING = "vllm-router consistent_hash"
HASHING_BAR = 1.3
LEAST_NOISE = 0.02
T_95 = {2: 12.7, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""Two-sided 95% quantiles of Student's t for so many seeds."""

Results = Mapping[str, Sequence[FleetFigures]]
"""Each router's figures, one for each seed."""


def run_seed(job: tuple[int, float, int, int]) -> dict[str, FleetFigures]:
    """One cell with one seed, under every router."""
    engines, waves, index, seed = job
    cell = cells(engines, waves)[index]
    gc.disable()  # the objects of a run live until its end, and the collector looks at them again and again
    figures: dict[str, FleetFigures] = {}
    for name, make in routers().items():
        figures[name] = cell.run(make(), seed)
        gc.collect()
    return figures


def run_cells(sizes: Mapping[int, float], seeds: int) -> list[tuple[Cell, Results]]:
    """Every cell under every router with every seed, on at most two cores."""
    every = [(n, w, i, cell) for n, w in sizes.items() for i, cell in enumerate(cells(n, w))]
    results: list[tuple[Cell, Results]] = []
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        jobs = [[(n, w, i, seed) for seed in range(seeds)] for n, w, i, _ in every]
        runs = [[pool.submit(run_seed, job) for job in of_cell] for of_cell in jobs]
        for (*_, cell), of_cell in zip(every, runs, strict=True):
            by_seed = [run.result() for run in of_cell]
            results.append((cell, {name: [figures[name] for figures in by_seed] for name in by_seed[0]}))
            ours = statistics.mean(figures[OURS].tokens_per_s for figures in by_seed)
            _common.note(f"{cell.title}: {ours:.0f} tokens/s with {OURS}")
    return results


def ratio_and_noise(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Geometric mean of the paired ratios, and what of its distance from 1 may be chance."""
    logs = [math.log(mine / other) for mine, other in zip(ours, theirs, strict=True)]
    spread = statistics.stdev(logs) / math.sqrt(len(logs)) * T_95.get(len(logs), 2.0) if len(logs) > 1 else 0.0
    return math.exp(statistics.mean(logs)), max(LEAST_NOISE, spread)


def rows(cell: Cell, results: Results) -> list[_common.Row]:
    """Ours against the best of all others, and against hashing where agents press on KV."""
    made: list[_common.Row] = []
    for name, more_is_better in (("tokens_per_s", True), ("p99_trajectory_s", False)):
        values = {router: [getattr(f, name) for f in figures] for router, figures in results.items()}
        pick = max if more_is_better else min
        best = pick((r for r in values if r != OURS), key=lambda r: statistics.geometric_mean(values[r]))
        ratio, noise = ratio_and_noise(values[OURS], values[best])
        bar = 1 - noise if more_is_better else 1 + noise
        ok = ratio >= bar if more_is_better else ratio <= bar
        ours, theirs = statistics.mean(values[OURS]), statistics.mean(values[best])
        made.append(_common.Row(f"{cell.title}: {name} against the best other, {best}", ours, theirs, ratio, bar, ok))
    if cell.presses_on_kv:
        ours, theirs = ([f.tokens_per_s for f in results[name]] for name in (OURS, HASHING))
        ratio, _ = ratio_and_noise(ours, theirs)
        case = f"{cell.title}: tokens_per_s against {HASHING}"
        mine, peer = statistics.mean(ours), statistics.mean(theirs)
        made.append(_common.Row(case, mine, peer, ratio, HASHING_BAR, ratio >= HASHING_BAR))
    return made


def summary(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation over the seeds of every figure, for each router."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for router, figures in results.items():
        table[router] = {}
        for field in fields(FleetFigures):
            values = [float(getattr(figure, field.name)) for figure in figures]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            table[router][field.name] = {"mean": round(statistics.mean(values), 4), "stdev": round(spread, 4)}
    return table


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = _common.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cells")
    parser.add_argument("--calibrate", action="store_true", help="measure a real engine, fit, and keep the constants")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each load when calibrating")
    return parser


def main() -> int:
    """Run and print."""
    args = options().parse_args()
    if args.calibrate:
        calibration = asyncio.run(_calibration.calibrate(1 if args.quick else args.repeats))
        _calibration.FILE.write_text(json.dumps(calibration, indent=2) + "\n")
        return _common.report("policies", _calibration.rows(calibration))
    calibration = json.loads(_calibration.FILE.read_text())
    results = run_cells({8: 1.5} if args.quick else SIZES, 2 if args.quick else args.seeds)
    made = _calibration.rows(calibration)
    for cell, by_router in results:
        made += rows(cell, by_router)
    document = {
        **_common.document("policies", made),
        "assumptions": {**ASSUMPTIONS, "speed": asdict(GPU_SPEED), "limits": asdict(GPU_LIMITS)},
        "cells": {cell.title: summary(by_router) for cell, by_router in results},
        "calibration": calibration,
    }
    print(json.dumps(document, indent=2))
    if args.plot:
        import _policy_plot  # noqa: PLC0415 - matplotlib takes a second to load

        _policy_plot.draw(document["cells"], args.plot)
    return 0 if all(row.ok for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
