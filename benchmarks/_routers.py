"""Sides of `router.py`: backends, load, our router as a user gets it, the peers, and the floor; and what each costs."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import psutil

from penstock.router.membership import EngineEntry, Membership
from penstock.router.state import RouterAdmin

HERE = Path(__file__).parent
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Side:
    """One router under load."""

    name: str
    port: int
    process: subprocess.Popen[Any]

    def cpu_s(self) -> float:
        """Processor time of all its threads, from the kernel's accounting (clock_getcpuclockid(3), in nanoseconds)."""
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._pids())

    def resident_mib(self) -> float:
        """Resident memory of its processes."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self._pids()) / 2**20

    def _pids(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [self.process.pid, *(child.pid for child in children)]


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the load generator saw."""

    seconds: float
    requests: int
    errors: int
    p50_us: float
    p99_us: float
    status: int


def build(folder: Path) -> None:
    """Compile the backend and the load generator into `folder`."""
    for name in ("backend", "load"):
        source = HERE / "native" / f"{name}.c"
        subprocess.run(["cc", "-O2", "-o", str(folder / name), str(source)], check=True, timeout=60)


def load(
    folder: Path, port: int, request: bytes, *, connections: int, requests: int, body: int, seconds: float = 120
) -> Load:
    """Send `request` so many times, and check that each answer has `body` bytes."""
    argv = [str(folder / "load"), *(str(part) for part in (port, connections, requests, body, seconds))]
    done = subprocess.run(argv, input=request, stdout=subprocess.PIPE, check=True, timeout=seconds + 10)
    return Load(**json.loads(done.stdout))


@contextmanager
def backends(folder: Path, count: int, tick_us: int) -> Iterator[list[int]]:
    """Ports of so many backends."""
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            argv = [str(folder / "backend"), str(tick_us)]
            process = stack.enter_context(_process(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            ports.append(int(_first_line(process)))
        yield ports


@contextmanager
def penstock(ports: Sequence[int], *, workers: int = 1) -> Iterator[Side]:
    """Our router: the process that a fleet starts, told of its engines as a fleet does."""
    argv = [sys.executable, "-m", "penstock.router", f'{{"workers": {workers}}}']
    with _process(argv, stdout=subprocess.PIPE) as process:
        url = _first_line(process).split()[-1]

        async def announce() -> None:
            admin = RouterAdmin(url)
            entries = tuple(EngineEntry(f"e{i}", f"http://127.0.0.1:{p}") for i, p in enumerate(ports))
            await admin.announce(Membership(1, entries))
            await admin.close()

        asyncio.run(announce())
        yield Side("penstock", int(url.rpartition(":")[2]), process)


@contextmanager
def raw(ports: Sequence[int]) -> Iterator[Side]:
    """The floor."""
    argv = [sys.executable, str(HERE / "_raw_proxy.py"), *map(str, ports)]
    with _process(argv, stdout=subprocess.PIPE) as process:
        yield Side("raw", int(_first_line(process)), process)


@contextmanager
def peer(name: str, ports: Sequence[int], *options: str) -> Iterator[Side]:
    """`vllm-router` or `sglang-router`, with its session policy, and little in its log.

    Without ports it listens and has no workers yet. The last one of two equal `options` is in force.
    """
    own = {
        "vllm-router": ["-m", "vllm_router.launch_router", "--policy", "consistent_hash", "--log-level", "warning"],
        "sglang-router": ["-m", "sglang_router.launch_router", "--policy", "manual", "--log-level", "warn"],
    }
    port = _common.free_port()
    argv = [sys.executable, *own[name], "--host", "127.0.0.1", "--port", str(port), "--prometheus-port"]
    argv += [str(_common.free_port()), *options]
    argv += ["--worker-urls", *(f"http://127.0.0.1:{p}" for p in ports)] if ports else []
    with _process(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        side = Side(name, port, process)
        _until_ready(side, serving=bool(ports))
        yield side


def have(name: str) -> bool:
    """Whether this peer is installed (extra `bench`)."""
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _until_ready(side: Side, *, serving: bool) -> None:
    body = b'{"model":"m","prompt":"1","max_tokens":0}'
    deadline = time.monotonic() + START_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=5)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if connection.getresponse().status == http.HTTPStatus.OK or not serving:
                return
        except (OSError, http.client.HTTPException):
            pass  # not listening yet
        finally:
            connection.close()
        if side.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{side.name} did not get ready (exit status {side.process.poll()})")
        time.sleep(0.1)


def _first_line(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with status {process.wait(timeout=10)}")
    return line.decode()


@contextmanager
def _process(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(argv, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
