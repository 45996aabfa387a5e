"""Weights from a trainer's GPU into engines: the link itself, vLLM's own transfer, and ours, turn by turn.

python benchmarks/weight_sync.py --model 8b                       trainer and engine on a GPU each, over NCCL
python benchmarks/weight_sync.py --model 8b --transport cuda_ipc  both on one GPU
    [--engines 1] [--tp 1] [--rounds 7] [--load 256]
python benchmarks/weight_sync.py --model 8b --kv recompute,keep_in_flight,keep   tokens lost to each update, by mode
    [--profile cpu]                                               a nano model on a CPU engine, to see that it runs

The same engines serve both sides, idle and with requests of 1k to 4k tokens in flight, each a stream of single tokens.
A round is timed where it is asked for, on both sides: from the first call to the answer of the last, and of ours from
the router's gate closing to its opening. What an engine says of ours is of the slowest; its load holds the clearing of
its KV cache, which vLLM's own has in its pause. VLLM's own side is of 0.26 (0.32 has another interface for trainers).
With `--kv` there is no peer: the modes take turns under one load.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, get_args

import _common
import _dummy_models
import _engine_key
import requests
import torch
from _line_process import LineProcess

from penstock.control_types import KV
from penstock.fleet.fleet import Fleet
from penstock.fleet.gpus import VISIBLE, visible_gpus

CLIENTS = 4
"""Processes that read the streams of one engine: one alone reads fewer tokens than an API process can write, and it is
that process's work behind which control calls wait."""
SETTLE_S, RECOVER_S = 2.0, 90.0
"""Over how long tokens must come as fast again as before the first round, so that each round under load finds the same;
and how long it may take until they do: an update makes engines compute the KV of what is in flight anew."""
AGAIN = 0.8
"""Of the speed before the first round."""
STATES: tuple[tuple[str, KV], ...] = (("idle", "recompute"), ("load", "recompute"), ("load, KV kept", "keep"))
BEGIN_S = 120.0
"""How long all streams may take to begin."""
STRAGGLERS = 0.1
"""Share of the streams that need not have begun: those that an engine holds back for want of KV cache."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs for decoding, as engines have them by default: without, the GPU makes fewer tokens than the API process
could hand out. Not compiled besides, which takes a minute more."""
LENGTHS = {"gpu": (1000, 4000), "cpu": (100, 400)}
"""Of the streams' prompts, in tokens."""
LOST_BAR = 1 / 50
"""Tokens lost with KV kept in flight, against all KV computed again."""
LINK_BAR, ROUND_BAR_S, ROUND_BAR, IPC_BAR_S = 1.5, 0.2, 0.1, 0.06


Found = dict[str, dict[str, dict[str, list[float]]]]
"""Seconds of each round: `{state: {side: {phase: [...]}}}`."""


class Load:
    """`_stream_load.py`, several to each engine, or nothing."""

    def __init__(self, urls: Sequence[str], model: str, requests: int, lengths: tuple[int, int]) -> None:
        argv = [sys.executable, str(Path(__file__).parent / "_stream_load.py")]
        shares = [requests // CLIENTS + (seed < requests % CLIENTS) for seed in range(CLIENTS)]
        self._processes = [
            LineProcess([*argv, url, model, str(share), *map(str, lengths), str(seed)])
            for url in urls
            for seed, share in enumerate(shares)
            if share
        ]
        self._urls = urls
        self._requests = requests * len(urls)
        self._steady = 0.0

    async def _ask(self, command: str) -> list[dict[str, float]]:
        async with asyncio.timeout(60):
            asked = [asyncio.to_thread(process.ask, command) for process in self._processes]
            return [json.loads(line) for line in await asyncio.gather(*asked)]

    async def ready(self) -> None:
        """Return when every stream has begun.

        Raises:
            Unmeasured: they have not after `BEGIN_S` seconds.
        """
        began, told = time.monotonic(), 0
        while (streams := await self._streams()) < (1 - STRAGGLERS) * self._requests:
            waited = time.monotonic() - began
            if waited >= BEGIN_S * (told + 1) / 4:
                told += 1
                held = [await asyncio.to_thread(_requests_at, url) for url in self._urls]
                _common.note(f"{streams} of {self._requests} streams have begun after {waited:.0f} s; {held}")
            if told == 4:
                raise _common.Unmeasured(f"not all streams have begun after {BEGIN_S} s")
            await asyncio.sleep(1)
        if self._processes:
            _common.note(f"{streams} of {self._requests} streams have begun after {time.monotonic() - began:.0f} s")
            await asyncio.sleep(SETTLE_S)
            self._steady = await self._speed(3 * SETTLE_S)

    async def _streams(self) -> float:
        return sum(answer["streams"] for answer in await self._ask("gaps"))

    async def mark(self) -> None:
        """From here on."""
        await self._ask("mark")

    async def gaps(self) -> dict[str, float]:
        """When tokens come as before: the streams' longest silences since the mark, and how long that took; seconds."""
        if not self._processes:
            return {}
        began = time.perf_counter()
        await asyncio.sleep(SETTLE_S)  # in which tokens come that were made before the round, and waited
        while await self._speed(SETTLE_S) < AGAIN * self._steady and time.perf_counter() - began < RECOVER_S:
            pass
        recovered = time.perf_counter() - began
        return {
            "until_as_fast_as_before": recovered,
            "tokens_per_s_before": self._steady,
            **await self.silences(),
        }

    async def silences(self) -> dict[str, float]:
        """Read the streams' longest silences since the mark, after a time in which late tokens arrive; seconds."""
        await asyncio.sleep(SETTLE_S)
        answers = await self._ask("gaps")
        return {
            "stream_gap_median": max(answer["median_gap_s"] for answer in answers),
            "stream_gap_max": max(answer["max_gap_s"] for answer in answers),
        }

    async def _speed(self, seconds: float) -> float:
        """Tokens/s that all streams bring."""
        before = sum(answer["tokens"] for answer in await self._ask("gaps"))
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        return (sum(answer["tokens"] for answer in await self._ask("gaps")) - before) / (time.perf_counter() - began)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.close()


def _requests_at(url: str) -> str:
    """Which requests an engine computes, and which wait there."""
    lines = requests.get(f"{url}/metrics", timeout=30).text.splitlines()
    counts = [line for line in lines if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{"))]
    return ", ".join(f"{line.partition('{')[0]} {line.split()[-1]}" for line in counts)


async def ours(fleet: Fleet, tensors: list[tuple[str, Any]], kv: KV) -> dict[str, float]:
    """One update by the fleet, phase by phase."""
    report = await fleet.update_weights(tensors, kv=kv)
    slowest = max(report.engines, key=lambda engine: engine.seconds["bubble"])
    return {
        **{f"fleet.{name}": seconds for name, seconds in report.seconds.items()},
        **slowest.seconds,
        "round": report.seconds["gate"],
        "start_to_finish": slowest.seconds.get("load.load", slowest.seconds["load"]),
    }


async def measure(args: Any, fleet: Fleet, tensors: list[tuple[str, Any]], found: Found) -> None:
    """Rounds of every side, turn by turn."""
    _engine_key.share(fleet)
    urls = [engine.url for engine in await fleet.engines()]
    native, peers = _sides(args, urls, tensors)
    with closing(peers) if peers is not None else nullcontext():
        flat = [tensor for _, tensor in tensors]

        async def one(side: str, kv: KV) -> dict[str, float]:
            if side == "penstock":
                return await ours(fleet, tensors, kv)
            if side == "vllm":
                return await asyncio.to_thread(native.update, tensors, kv == "recompute")
            return {"start_to_finish": await asyncio.to_thread(_link, peers, flat)}

        await _rounds(args, urls, one, found)


async def _rounds(
    args: Any, urls: Sequence[str], one: Callable[[str, KV], Awaitable[dict[str, float]]], found: Found
) -> None:
    sides = side_names(args)
    longest = 0.0
    for state, kv in STATES if args.load else STATES[:1]:
        with closing(Load(urls, args.path, 0 if state == "idle" else args.load, LENGTHS["gpu"])) as load:
            await load.ready()
            for number in range(args.rounds + 1):
                began = time.monotonic()
                if began + longest > args.until and state in found:
                    _common.note(f"{state}: {number - 1} rounds until the limit")
                    break
                for side in sides[:: 1 if number % 2 else -1]:
                    await load.mark()
                    seconds = await one(side, kv)
                    seconds |= await load.gaps() if side != "link" else {}
                    _common.note(f"{state} {side}: " + ", ".join(f"{k} {v:.4f}" for k, v in seconds.items()))
                    if number:  # the first round of each makes groups, plans and caches
                        _add(found.setdefault(state, {}).setdefault(side, {}), seconds)
                longest = max(longest, time.monotonic() - began)


async def measure_losses(args: Any, fleet: Fleet, tensors: list[tuple[str, Any]], found: Found) -> None:
    """Updates of every mode under one load, turn by turn, each when the engines' own rate is back."""
    _engine_key.share(fleet)
    urls = [engine.url for engine in await fleet.engines()]
    with closing(Load(urls, args.path, args.load, LENGTHS[args.profile])) as load:
        await load.ready()
        for number in range(args.rounds + 1):
            if time.monotonic() > args.until:
                _common.note(f"{number - 1} rounds until the limit")
                break
            for kv in args.kv[:: 1 if number % 2 else -1]:
                await load.mark()
                report = await fleet.update_weights(tensors, kv=kv)
                report, gaps = await fleet.recovered(report, timeout_s=RECOVER_S), await load.silences()
                losses = [engine.loss for engine in report.engines if engine.loss is not None]
                if not losses:
                    raise _common.Unmeasured("no engine measured what an update cost")
                figures = {
                    "tokens_lost": sum(loss.tokens for loss in losses),
                    "until_back": max(loss.seconds for loss in losses),
                    "steady_tokens_per_s": sum(loss.rate for loss in losses),
                    "kept": float(sum(engine.kept for engine in report.engines)),
                    "bubble": report.bubble,
                    **gaps,
                }
                _common.note(f"{kv}: " + ", ".join(f"{k} {v:.4f}" for k, v in figures.items()))
                if number:
                    _add(found.setdefault(kv, {}).setdefault("penstock", {}), figures)


def loss_rows(args: Any, found: Found) -> list[_common.Row]:
    """The bar: median tokens lost with KV kept in flight, against those with KV computed again."""
    lost = {kv: statistics.median(sides["penstock"]["tokens_lost"]) for kv, sides in found.items()}
    if not {"recompute", "keep_in_flight"} <= lost.keys() or lost["recompute"] <= 0:
        return []
    case = f"{args.model}, {args.engines} engine(s), {args.load} streams, tokens lost by an update, KV kept in flight"
    return [_common.compare(case, lost["keep_in_flight"], lost["recompute"], bar=LOST_BAR, want="at most")]


def modes(text: str) -> list[str]:
    """Read names of KV modes with commas between them."""
    if unknown := set(names := text.split(",")) - set(get_args(KV)):
        raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}; known: {', '.join(get_args(KV))}")
    return names


def _add(rounds: dict[str, list[float]], seconds: dict[str, float]) -> None:
    for phase, value in seconds.items():
        rounds.setdefault(phase, []).append(value)


def side_names(args: Any) -> list[str]:
    """VLLM's own IPC shows the memory of one GPU to one engine."""
    alone = args.transport == "cuda_ipc" and args.engines * args.tp > 1
    return ["link", "penstock"] if alone else ["link", "vllm", "penstock"]


def _sides(args: Any, urls: Sequence[str], tensors: list[tuple[str, Any]]) -> tuple[Any, Any]:
    import _native_sync  # noqa: PLC0415 - needs vLLM 0.26
    import _raw_broadcast  # noqa: PLC0415

    if args.transport == "cuda_ipc":
        return _native_sync.NativeIpc(urls) if "vllm" in side_names(args) else None, None
    gpus = range(torch.cuda.device_count() - args.engines * args.tp, torch.cuda.device_count())
    peers = _raw_broadcast.Peers(_common.free_port(), gpus, [tensor for _, tensor in tensors])
    return _native_sync.NativeNccl(urls, _common.free_port(), args.tp), peers


def _link(peers: Any, tensors: list[Any]) -> float:
    """The same bytes over the link: to other GPUs, or copied on this one."""
    if peers is not None:
        return peers.round(tensors)
    into = torch.empty(max(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for tensor in tensors:
        into[: tensor.numel()].copy_(tensor.view(-1))
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def rows(args: Any, found: Found) -> list[_common.Row]:
    """The bars, on medians, of states in which every side had a round."""
    found = {state: sides for state, sides in found.items() if len(sides) == len(side_names(args))}
    if "idle" not in found:
        return []

    def median(state: str, side: str, phase: str) -> float:
        return statistics.median(found[state][side][phase])

    name = f"{args.model} bf16, {args.engines} engine(s), TP {args.tp}, {args.transport}"
    if args.transport == "cuda_ipc":
        loading = median("idle", "penstock", "start_to_finish")
        out = [_common.single(f"{name}, idle, start to finish, s", loading, bar=IPC_BAR_S, want="at most")]
    else:
        link = median("idle", "link", "start_to_finish")
        loading = median("idle", "penstock", "start_to_finish")
        case = f"{name}, idle, start to finish against the link, s"
        out = [_common.compare(case, loading, link, bar=LINK_BAR, want="at most")]
    for state, sides in found.items():
        mine = median(state, "penstock", "round")
        if "vllm" in sides:
            case = f"{name}, {state}, pause to resume against vLLM's own, s"
            bar = 1.0 if state == "idle" else ROUND_BAR
            out.append(_common.compare(case, mine, median(state, "vllm", "round"), bar=bar, want="at most"))
        if state != "idle" and args.transport != "cuda_ipc" and args.model != "32b":  # whose bytes alone take as long
            out.append(_common.single(f"{name}, {state}, pause to resume, s", mine, bar=ROUND_BAR_S, want="at most"))
    return out


async def _on_cpu(args: Any, options: Any) -> int:
    if not args.kv:
        options.error("--profile cpu measures tokens lost: give --kv")
    args.model = "nano"
    with tempfile.TemporaryDirectory() as folder:
        path = _dummy_models.save(Path(folder), args.model)
        args.path = str(path)
        tensors = [(name, torch.randn(shape) * 0.02) for name, shape in _dummy_models.shapes(path)]
        found: Found = {}
        async with Fleet.launch(
            path, args.engines, profile="cpu", load_format="dummy", dtype="float32", max_model_len=4096,
            max_num_seqs=256, log_dir=args.logs,
        ) as fleet:  # fmt: skip
            whole = await _common.until_ended(measure_losses(args, fleet, tensors, found))
        status = _common.report("weight_sync", loss_rows(args, found), seconds=found)
    return status or int(not whole)


async def main() -> int:
    """Launch, measure, print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--model", choices=sorted(_dummy_models.SHAPES), default="0.6b")
    options.add_argument("--transport", choices=("broadcast", "cuda_ipc"), default="broadcast")
    options.add_argument("--engines", type=int, default=1)
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--load", type=int, default=256, help="requests in flight at each engine; 0: idle only")
    options.add_argument(
        "--limit", type=float, default=3600, help="seconds after which no round shall end, beyond the first"
    )
    options.add_argument("--logs", help="folder for the engines' logs")
    options.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization of an engine")
    options.add_argument("--kv", type=modes, help="measure tokens lost by these modes, with commas between them")
    options.add_argument("--profile", choices=("gpu", "cpu"), default="gpu", help="cpu: with --kv, a nano model")
    args = options.parse_args()
    args.until = time.monotonic() + args.limit
    if args.quick:
        args.rounds = 2
    if args.profile == "cpu":
        return await _on_cpu(args, options)
    if args.transport == "cuda_ipc" and (gpus := visible_gpus()):  # of more, engines get the last, trainers the first
        os.environ[VISIBLE] = ",".join(gpus[-args.engines * args.tp :])
    if torch.cuda.device_count() < args.engines * args.tp + (args.transport == "broadcast"):
        _common.note(f"{torch.cuda.device_count()} GPUs are too few for this: nothing is measured")
        return _common.report("weight_sync", [])
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM's own IPC pickles its handles
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # stdout is for the document
    with tempfile.TemporaryDirectory() as folder:
        path = _dummy_models.save(Path(folder), args.model)
        args.path = str(path)
        backend = {"backend": "ipc" if args.transport == "cuda_ipc" else "nccl"}
        launch = Fleet.launch(
            path, args.engines, profile="gpu", load_format="dummy", tensor_parallel_size=args.tp,
            max_model_len=8192, max_num_seqs=256, gpu_memory_utilization=args.memory, weight_transport=args.transport,
            log_dir=args.logs, health_interval_s=86400,  # the peer changes the same engine behind the fleet
            extra_args={
                "weight-transfer-config": json.dumps(backend), "attention-backend": "FLASH_ATTN",
                "compilation-config": json.dumps(GRAPHS),
            },
        )  # fmt: skip
        async with launch as fleet:
            torch.cuda.set_device(0)
            tensors = [
                (name, torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
                for name, shape in _dummy_models.shapes(path)
            ]
            found: Found = {}
            work = measure_losses if args.kv else measure
            whole = await _common.until_ended(work(args, fleet, tensors, found))
            table = (
                loss_rows(args, found) if args.kv else rows(args, found)
            )  # told before the engines end, which a limit of time may cut
            status = _common.report("weight_sync", table, seconds=found)
    return status or int(not whole)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
