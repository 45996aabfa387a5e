"""Seconds from nothing to two engines serving: ours against vLLM's server with its defaults, interleaved.

    python benchmarks/startup.py [--engines 2] [--rounds 3]

Ours includes the router. The peer's command is `vllm serve MODEL --port P`, started as a module, since vLLM's CPU build
has no working `vllm` command, and with one option: by default an engine takes 92% of the memory for its cache, so that
a second one does not start at all.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import _common

from penstock.errors import PenstockError
from penstock.fleet.fleet import Fleet
from penstock.http import HttpTransport
from penstock.process import ChildProcess
from penstock.types import SamplingParams

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
BAR = 0.6
DEADLINE_S = 400.0
MEMORY_SHARE = 0.3


async def ours(engines: int) -> float:
    """Launch a fleet and have its first answer."""
    began = time.perf_counter()
    async with Fleet.launch(MODEL, engines, profile="cpu") as fleet:
        await fleet.sample([5, 6, 7], 1, SamplingParams(max_tokens=4))
        return time.perf_counter() - began


async def defaults(engines: int) -> float:
    """Start vLLM's own servers and have each one's first answer."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:
        children: list[ChildProcess] = []
        try:
            ports = [_common.free_port() for _ in range(engines)]
            for port in ports:
                argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
                argv += ["--gpu-memory-utilization", str(MEMORY_SHARE)]
                log = Path(logs, f"{port}.log")
                children.append(await ChildProcess.start([sys.executable, *argv], name=str(port), log=log))
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(*(first_answer(port, c) for port, c in zip(ports, children, strict=True)))
            return time.perf_counter() - began
        finally:
            for child in children:
                await child.stop(20.0)


async def first_answer(port: int, child: ChildProcess) -> None:
    """Ask until the server answers."""
    http = HttpTransport(f"http://127.0.0.1:{port}")
    body = {"model": str(MODEL), "prompt": [5, 6, 7], "max_tokens": 4}
    while True:
        try:
            await http.post("/v1/completions", body, timeout_s=120.0)
        except PenstockError:
            if child.returncode is not None:
                raise SystemExit(f"vLLM's server did not start:\n{child.said(4000)}") from None
            await asyncio.sleep(0.2)
        else:
            break
    await http.close()


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    mine: list[float] = []
    theirs: list[float] = []
    for i in range(1 if args.quick else args.rounds):
        mine.append(await ours(args.engines))
        theirs.append(await defaults(args.engines))
        _common.note(f"round {i + 1}: {mine[-1]:.1f} s and {theirs[-1]:.1f} s")
    case = f"seconds to the first answer of {args.engines} engines"
    row = _common.compare(case, statistics.median(mine), statistics.median(theirs), bar=BAR, want="at most")
    return _common.report("startup", [row])


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
