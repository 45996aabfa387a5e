"""Run the `penstock` command as a person does: in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from patience import WAIT_S, asked

PENSTOCK = Path(sys.executable).parent / "penstock"

RUNTIME = tempfile.TemporaryDirectory(prefix="penstock-cli-")
"""Where control sockets lie, those that a killed server leaves among them."""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "PENSTOCK_RUNTIME_DIR": RUNTIME.name, **extra}


def penstock(*args: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, at most `WAIT_S`."""
    argv, env = [PENSTOCK, *args], environment(**extra)
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)


FORKER = """
import json, os, sys, traceback
import penstock.cli.main as cli, penstock.config, penstock.fleet.attach
for line in sys.stdin:
    asked = json.loads(line)
    if (child := os.fork()) == 0:
        for path, number in ((os.devnull, 0), (asked["out"], 1), (asked["err"], 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv, status = ["penstock", *asked["args"]], 1
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def forker() -> subprocess.Popen[str]:
    """Start a process that has imported the command, and forks for every call of it; it ends with ours."""
    argv = [sys.executable, "-c", FORKER]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def forked(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end as `penstock` does, without the half second that a new Python takes to import it."""
    process = forker()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        asked = {"args": args, "cwd": str(cwd), "env": environment(), "out": str(out), "err": str(err)}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(args, status, out.read_text(), err.read_text())


def python_without(folder: Path, *absent: str) -> dict[str, str]:
    """The environment of this Python, told not to find some modules."""
    (folder / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"absent = {absent!r}\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in absent else find(name, *rest)\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


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
        status = self.process.wait(timeout=WAIT_S)
        _, alive = psutil.wait_procs(self.family, timeout=WAIT_S)
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
        process.wait(timeout=WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    """The children of a process, when there are `count` of them; there is no event to wait for."""

    async def children() -> list[psutil.Process]:
        return psutil.Process(pid).children(recursive=True)

    return asyncio.run(asked(children, lambda found: len(found) >= count))


def wait_for_text(log: Path, text: str) -> None:
    """Until a process has written it."""
    asyncio.run(asked(lambda: asyncio.to_thread(log.read_text), lambda written: text in written))
