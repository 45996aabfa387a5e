"""What every benchmark prints: one JSON document with the machine, the versions, and ours against the peer's.

{"benchmark": ..., "machine": {...}, "versions": {...},
 "rows": [{"case", "ours", "peer", "ratio", "bar", "ok"}]}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.engine.launch import reserved_port
from penstock.observe.summary import package_versions

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One case: our figure, the peer's, ours by the peer's, and whether that meets the bar.

    `peer` is None where a figure stands alone and the bar is for `ours` itself.
    """

    case: str
    ours: float
    peer: float | None
    ratio: float | None
    bar: float
    ok: bool


def compare(case: str, ours: float, peer: float, *, bar: float, want: Literal["at least", "at most"]) -> Row:
    """A row whose bar is for the ratio ours/peer."""
    if peer <= 0:
        raise ValueError(f"case {case!r}: the peer's figure must be positive, got {peer}")
    ratio = ours / peer
    return Row(case, ours, peer, ratio, bar, ratio >= bar if want == "at least" else ratio <= bar)


def single(case: str, ours: float, *, bar: float, want: Literal["at least", "at most"]) -> Row:
    """A row without a peer, whose bar is for our figure itself."""
    return Row(case, ours, None, None, bar, ours >= bar if want == "at least" else ours <= bar)


def document(benchmark: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The document of one benchmark on this machine."""
    return {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": package_versions(),
        "rows": [asdict(row) for row in rows],
    }


def report(benchmark: str, rows: Sequence[Row], **beside: Any) -> int:
    """Print the document on stdout, with what shall stand in it beside its rows.

    Returns:
        The exit status: 0 where every row meets its bar, else 1.
    """
    print(json.dumps({**document(benchmark, rows), **beside}, indent=2), flush=True)
    return 0 if all(row.ok for row in rows) else 1


def machine() -> dict[str, Any]:
    """What a figure depends on: processor, cores that this process may use, memory, GPUs, system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with reserved_port() as port:
        return port


def parser(description: str) -> argparse.ArgumentParser:
    """A parser of a benchmark's options; each has `--quick`, which shows that it runs and measures little."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs")
    return options


def note(text: str) -> None:
    """Say on stderr how far a benchmark is; stdout is for the document."""
    print(text, file=sys.stderr, flush=True)


class Unmeasured(Exception):  # noqa: N818 - not of the program, but of what it is to measure
    """A benchmark cannot go on, and says why."""


async def until_ended(work: Coroutine[Any, Any, None]) -> bool:
    """Run it; whether it came to its end before SIGTERM, SIGINT or `Unmeasured`: what was found can still be told."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        for number in signals:  # another one ends the process
            loop.remove_signal_handler(number)
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        note("ended early: this is what was measured until then")
        return False
    except Unmeasured as error:
        note(f"{error}: this is what was measured until then")
        return False
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    return True


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Models of the NVIDIA devices, from the driver's own files."""
    names: list[str] = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names += [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("Model")]
    return names
