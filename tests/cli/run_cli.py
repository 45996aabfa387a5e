"""Run the `penstock` command as a person does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PENSTOCK = Path(sys.executable).parent / "penstock"
END_S = 60.0
"""Within which everything has to be gone; generous, for a machine with other things to do."""

RUNTIME = tempfile.TemporaryDirectory(prefix="penstock-cli-")
"""Where control sockets lie, those that a killed server leaves among them."""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "PENSTOCK_RUNTIME_DIR": RUNTIME.name, **extra}


def penstock(*args: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, at most 60 s."""
    return subprocess.run(
        [PENSTOCK, *args], cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=60, check=False
    )


@dataclass(frozen=True, slots=True)
class Server:
    """A `penstock serve` (or `sim`) that is ready."""

    process: subprocess.Popen[str]
    url: str
    family: list[psutil.Process]
    """Itself and every process it started, when it was ready."""

    def signal(self, number: int) -> int:
        """Send a signal, wait for everything to end, and return the exit status; what is left over fails the test."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=END_S)
        _, alive = psutil.wait_procs(self.family, timeout=END_S)
        assert not alive, f"left running: {[process.cmdline() for process in alive]}"
        return status


@contextmanager
def serving(log: Path, *args: str, **extra: str) -> Iterator[Server]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            [PENSTOCK, *args], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(**extra)
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready:"), log.read_text()
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        yield Server(process, ready.split()[-1].removesuffix("/v1"), family)
    finally:
        process.kill()
        process.wait(timeout=END_S)
        assert process.stdout is not None
        process.stdout.close()


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    """The children of a process, when there are `count` of them; there is no event to wait for."""
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        found = psutil.Process(pid).children(recursive=True)
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"process {pid} did not start {count} children within {END_S} s")


def wait_for_text(log: Path, text: str) -> None:
    """Until a process has written it."""
    end = time.monotonic() + END_S
    while text not in (written := log.read_text()):
        assert time.monotonic() < end, f"no {text!r} within {END_S} s in: {written}"
        time.sleep(0.02)
