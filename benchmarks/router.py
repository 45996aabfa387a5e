"""What the router costs against vllm-router, sglang-router and a bare pass-through, interleaved; needs extra `bench`.

python benchmarks/router.py [--rounds 5] [--cases small,sse] [--sides penstock,raw]
python benchmarks/router.py --workers 1,2,4,8 [--rounds 3]

Every side stands before the same two backends (`native/backend.c`) under the same load (`native/load.c`), and must
answer every request in full. Processor time is the kernel's, all threads: the figure that a busy machine spoils least.
Sessions, metrics and deadlines are on in ours; each peer has its session policy. The bars are for vllm-router;
sglang-router, which does less (no token ids), must not be ahead. With `--workers`, ours is a router of so many
processes, beside vllm-router alone: see `_router_workers.py`.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import _common
import _router_workers
import _routers
from _router_workers import WorkersCase
from _routers import Load, Side

PEERS = ("vllm-router", "sglang-router")
TICK_US = 20_000
UNIT, CHUNK = 64, 256
"""Bytes of an answer for each of `max_tokens`; of a streamed chunk (see `native/backend.c`)."""
CHUNKS = 60
PROMPT = 32_768


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request, how many of them, and the bars for ours by a peer's."""

    connections: int
    requests: int
    prompt: int
    max_tokens: int
    bars: dict[str, float]
    stream: bool = False

    @property
    def answer(self) -> int:
        """Payload bytes of an answer."""
        return self.max_tokens * (CHUNK if self.stream else UNIT)

    def request(self, side: str) -> bytes:
        """As an engine client sends it; sglang-router takes the session from a header of its own, and text only."""
        body: dict[str, object] = {"model": "m", "prompt": [100_000 + i % 900_000 for i in range(self.prompt)]}
        session = "X-Session-ID"
        if side == "sglang-router":
            session = "X-SMG-Routing-Key"
            if self.prompt < PROMPT:
                body["prompt"] = "1 " * self.prompt
        body |= {"max_tokens": self.max_tokens, "temperature": 1.0}
        if self.stream:
            body["stream"] = True
        content = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n{session}: %SESSION%\r\nAccept: */*\r\n"
            "Accept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11 aiohttp/3.14.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        return head.encode() + content


CPU, RATE, P50, MEMORY = "CPU us/request", "requests/s", "p50 us", "resident MiB"
CHUNK_CPU = "CPU us/chunk"
CASES = {
    "small": Case(32, 20_000, 8, 4, {CPU: 0.6, RATE: 1.3}),
    "one connection": Case(1, 4_000, 8, 4, {P50: 0.8}),
    "1 MB answer": Case(8, 400, 8, 16_384, {CPU: 0.75}),
    "32k-id prompt": Case(8, 400, PROMPT, 4, {CPU: 0.1}),
    "sse": Case(256, 512, 8, CHUNKS, {CHUNK_CPU: 0.8}, stream=True),
    "2000 streams": Case(2000, 2000, 8, 20, {MEMORY: 0.5}, stream=True),
}
_FIGURES: dict[str, Callable[[Case, Load, float, float], float]] = {
    CPU: lambda case, load, cpu, mib: cpu / load.requests * 1e6,  # noqa: ARG005
    CHUNK_CPU: lambda case, load, cpu, mib: cpu / (load.requests * case.max_tokens) * 1e6,  # noqa: ARG005
    RATE: lambda case, load, cpu, mib: load.requests / load.seconds,  # noqa: ARG005
    P50: lambda case, load, cpu, mib: load.p50_us,  # noqa: ARG005
    MEMORY: lambda case, load, cpu, mib: mib,  # noqa: ARG005
}

Figures = dict[tuple[str, str, str], list[float]]
"""By case, figure and side, one for each round."""


def measure(folder: Path, sides: Sequence[Side], cases: Sequence[str], rounds: int, *, quick: bool) -> Figures:
    """Each case in turn, its sides in another order each round; what a side refuses has no figure."""
    figures: Figures = defaultdict(list)
    order = random.Random(0)
    refused: set[tuple[str, str]] = set()
    for name in cases:
        case = CASES[name]
        requests = max(case.connections, case.requests // 10) if quick else case.requests
        for round_number in range(-1, 1 if MEMORY in case.bars else rounds):  # the first warms up
            for side in order.sample(list(sides), len(sides)):
                if (name, side.name) in refused:
                    continue
                before = side.cpu_s()
                count = max(case.connections, requests // 10) if round_number < 0 else requests
                load = _routers.load(
                    folder, side.port, case.request(side.name), connections=case.connections, requests=count,
                    body=case.answer,
                )  # fmt: skip
                cpu = side.cpu_s() - before
                if load.errors:
                    _common.note(f"{name}: {side.name} failed {load.errors} of {count} requests, status {load.status}")
                    refused.add((name, side.name))
                elif round_number >= 0:
                    for what in case.bars:
                        value = _FIGURES[what](case, load, cpu, side.resident_mib())
                        figures[name, what, side.name].append(value)
        for (_, what, side_name), values in [item for item in figures.items() if item[0][0] == name]:
            _common.note(f"{name}, {what}: {side_name} {statistics.median(values):.2f}")
    return figures


def rows(figures: Figures, cases: Sequence[str]) -> list[_common.Row]:
    """Ours by each peer's, medians of the rounds."""
    made: list[_common.Row] = []
    for name in cases:
        for what, bar in CASES[name].bars.items():
            ours = figures.get((name, what, "penstock"))
            for peer in PEERS:
                theirs = figures.get((name, what, peer))
                if not ours or not theirs:
                    continue
                want = "at least" if what == RATE else "at most"
                case = f"{name}, {what}, against {peer}"
                medians = statistics.median(ours), statistics.median(theirs)
                least = bar if peer == "vllm-router" else 1.0
                made.append(_common.compare(case, *medians, bar=least, want=want))
    return made


def measure_workers(workers: Sequence[int], rounds: int, *, quick: bool) -> int:
    """Routers of several processes."""
    small, sse = CASES["small"], CASES["sse"]
    name = _router_workers.PEER
    cases = {
        "small requests": WorkersCase(256, 40_000, 1, small.answer, small.request(name)),
        "streamed chunks": WorkersCase(1_024, 1_024, sse.max_tokens, sse.answer, sse.request(name)),
    }
    medians = _router_workers.measure(cases, workers, rounds, quick=quick)
    made = _router_workers.rows(medians, list(cases), workers)
    answer = _common.document("router workers", made)
    if _routers.have(name):
        answer["versions"][name] = version(name)
    answer["medians"] = [
        {"case": case, "figure": what, "side": side, "median": median} for (case, what, side), median in medians.items()
    ]
    print(json.dumps(answer, indent=2))
    return 0 if all(row.ok for row in made) else 1


def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--workers", help="comma-separated numbers of processes, such as 1,2,4,8")
    options.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    options.add_argument("--sides", default=",".join(("penstock", "raw", *PEERS)), help="comma-separated")
    args = options.parse_args()
    if args.workers:
        counts = [int(count) for count in args.workers.split(",")]
        return measure_workers(counts, 1 if args.quick else args.rounds, quick=args.quick)
    cases: list[str] = args.cases.split(",")
    wanted: list[str] = args.sides.split(",")
    missing = [name for name in wanted if name in PEERS and not _routers.have(name)]
    if missing:
        _common.note(f"not installed: {', '.join(missing)}; pip install 'penstock[bench]'")
        return 2
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _routers.build(folder)
        ports = stack.enter_context(_routers.backends(folder, 2, TICK_US))
        own = {"penstock": _routers.penstock, "raw": _routers.raw}
        sides = [stack.enter_context(own[n](ports) if n in own else _routers.peer(n, ports)) for n in wanted]
        figures = measure(folder, sides, cases, 1 if args.quick else args.rounds, quick=args.quick)
    made = rows(figures, cases)
    answer = _common.document("router", made)
    answer["versions"] |= {name: version(name) for name in wanted if name in PEERS}
    answer["medians"] = [
        {"case": case, "figure": what, "side": side, "median": statistics.median(v), "min": min(v), "max": max(v)}
        for (case, what, side), v in figures.items()
    ]
    print(json.dumps(answer, indent=2))
    return 0 if made and all(row.ok for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
