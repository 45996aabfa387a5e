"""`router.py --workers 1,2,4,8`: our router of so many processes beside vllm-router, under load from several processes.

Each load process gets its part of the connections, so that the load keeps up with eight workers on 16 cores or more.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import _common
import _routers
from _routers import Side

PEER = "vllm-router"
LEAST_CORES = 16
TICK_US = 4_000
"""With 1,024 streams, chunks for more routers than there are here: 256,000 a second."""
RATE, CPU = "a second", "CPU us"
PEER_BARS = {RATE: 2.0, CPU: 0.5}
"""Of eight workers."""
SCALING_BAR = 2.5
"""Of four workers against one, in requests or chunks a second."""


@dataclass(frozen=True, slots=True)
class WorkersCase:
    """One kind of request, and what is counted of it."""

    connections: int
    requests: int
    """In one round, of one worker; more workers get as many more."""
    units: int
    """Counted for each request."""
    bytes: int
    """Payload of an answer."""
    request: bytes


Medians = dict[tuple[str, str, str], float]
"""By case, figure and side."""


def sides_of(workers: Sequence[int]) -> list[str]:
    """Names of our sides."""
    return [f"{count} worker{'s' if count > 1 else ''}" for count in workers]


def measure(cases: dict[str, WorkersCase], workers: Sequence[int], rounds: int, *, quick: bool) -> Medians:
    """Each case in turn, its sides in another order each round; the first round warms up."""
    figures: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    order = random.Random(0)
    cores = len(os.sched_getaffinity(0))
    helpers = max(1, cores // 4)
    if cores < LEAST_CORES:
        _common.note(f"{cores} cores: routers, load and backends share them, so the bars say little (16 or more do)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _routers.build(folder)
        ports = stack.enter_context(_routers.backends(folder, max(2, helpers), TICK_US))
        sides: list[tuple[str, int, Side]] = [
            (name, count, stack.enter_context(_routers.penstock(ports, workers=count)))
            for name, count in zip(sides_of(workers), workers, strict=True)
        ]
        if _routers.have(PEER):
            sides.append((PEER, 1, stack.enter_context(_routers.peer(PEER, ports))))
        for name, case in cases.items():
            for round_number in range(-1, rounds):
                for side_name, count, side in order.sample(sides, len(sides)):
                    part = 10 if quick or round_number < 0 else 1
                    requests = max(case.connections, case.requests * min(count, cores) // part)
                    rate, cpu = run(folder, side, case, requests, helpers)
                    if round_number >= 0:
                        figures[name, RATE, side_name].append(rate)
                        figures[name, CPU, side_name].append(cpu)
            for side_name, _, _ in sides:
                rate, cpu = (statistics.median(figures[name, what, side_name]) for what in (RATE, CPU))
                _common.note(f"{name}: {side_name} {rate:,.0f} a second, {cpu:.1f} us of processor time each")
    return {key: statistics.median(values) for key, values in figures.items()}


def run(folder: Path, side: Side, case: WorkersCase, requests: int, helpers: int) -> tuple[float, float]:
    """Units a second over all load processes, and microseconds of the router's processor time for each unit."""
    before = side.cpu_s()
    with ThreadPoolExecutor(helpers) as threads:
        loads = [
            threads.submit(
                _routers.load, folder, side.port, case.request, connections=max(1, case.connections // helpers),
                requests=max(1, requests // helpers), body=case.bytes,
            )
            for _ in range(helpers)
        ]  # fmt: skip
    done = [load.result() for load in loads]
    cpu_s = side.cpu_s() - before
    failed = sum(load.errors for load in done)
    if failed:
        raise RuntimeError(f"{side.name} failed {failed} of {requests} requests, status {done[0].status}")
    units = sum(load.requests for load in done) * case.units
    return sum(load.requests * case.units / load.seconds for load in done), cpu_s / units * 1e6


def rows(medians: Medians, cases: Sequence[str], workers: Sequence[int]) -> list[_common.Row]:
    """Eight workers by vllm-router, and four by one."""
    made: list[_common.Row] = []
    names = dict(zip(workers, sides_of(workers), strict=True))
    for case in cases:
        for what, bar in PEER_BARS.items():
            if 8 in names and (case, what, PEER) in medians:
                ours, theirs = medians[case, what, names[8]], medians[case, what, PEER]
                want = "at least" if what == RATE else "at most"
                made.append(_common.compare(f"{case}, {what}, 8 workers, {PEER}", ours, theirs, bar=bar, want=want))
        if {1, 4} <= names.keys():
            four, one = medians[case, RATE, names[4]], medians[case, RATE, names[1]]
            made.append(_common.compare(f"{case}, {RATE}, 4 workers, 1", four, one, bar=SCALING_BAR, want="at least"))
    return made
