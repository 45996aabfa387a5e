"""What it costs that an engine tells every 16, 64 or 256 tokens what a sample has, against vLLM's own answer.

    python benchmarks/chunk_overhead.py [--concurrent 64] [--rounds 7]
    python benchmarks/chunk_overhead.py --profile gpu --model 0.6b    on a GPU, weights made up

A death costs at most the last chunk (`fleet.stream_chunk_tokens`), so smaller is safer. One real engine, the same
requests for every size, sizes in an order drawn anew for each round; tokens/s, and processor time of the client and of
the engine for each 1000 tokens. About five minutes on two cores, one with `--quick`.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _common
import _dummy_models
import psutil

from penstock.aio import all_or_first_error
from penstock.engine.client import DataClient
from penstock.engine.partial import Partials, whole_of
from penstock.engine.vanilla import report_of
from penstock.fleet.fleet import Fleet
from penstock.types import SamplingParams
from penstock.wire import GENERATE, generate_body

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
MAX_MODEL_LEN = 640
TOKENS = 512
ANSWER_S = 300.0
OWN = 0
"""VLLM's own answer, as any client gets it that asks for nothing else."""
CHUNKS = (16, 64, 256)
THROUGHPUT_BARS = {16: 0.85, 64: 0.95, 256: 0.95}
CLIENT_BARS = {16: 3.0, 64: 1.5, 256: 1.2}
ENGINE_BARS = {16: 1.15, 64: 1.08, 256: 1.05}


@dataclass(frozen=True, slots=True)
class Run:
    """One size's turn."""

    tokens_per_second: float
    client_ms: float
    """Processor time for each 1000 tokens."""
    engine_ms: float


async def turn(client: DataClient, engine: psutil.Process, concurrent: int, seed: int) -> Run:
    """So many requests at once, to their end."""

    async def ask(i: int) -> int:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False, seed=seed + i)
        prompt = [5 + i % 80, 6, 7]
        if client.stream_chunk_tokens == OWN:
            answer = await client.http.post(GENERATE, generate_body(prompt, params), timeout_s=ANSWER_S)
            partials = Partials()
            partials.add(report_of(choice) for choice in answer["choices"])
            sample = whole_of(partials.get(0), params, [[0, 0, TOKENS]])
        else:
            (sample,) = await client.sample(prompt, 1, params)
        return len(sample.token_ids)

    engine_began, client_began, began = processor_s(engine), time.process_time(), time.perf_counter()
    tokens = sum(await all_or_first_error(ask(i) for i in range(concurrent)))
    seconds, client_s = time.perf_counter() - began, time.process_time() - client_began
    engine_s = processor_s(engine) - engine_began
    return Run(tokens / seconds, 1e6 * client_s / tokens, 1e6 * engine_s / tokens)


def processor_s(process: psutil.Process) -> float:
    """Processor time of a process and its children, in seconds."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def rows(runs: dict[int, list[Run]], concurrent: int) -> list[_common.Row]:
    """Each size against vLLM's own answer; medians of the rounds."""
    kinds: list[tuple[str, Callable[[Run], float], dict[int, float]]] = [
        ("tokens/s", lambda run: run.tokens_per_second, THROUGHPUT_BARS),
        ("client's processor time, ms for 1000 tokens", lambda run: run.client_ms, CLIENT_BARS),
        ("engine's processor time, ms for 1000 tokens", lambda run: run.engine_ms, ENGINE_BARS),
    ]
    made: list[_common.Row] = []
    for what, figure, bars in kinds:
        own = statistics.median(map(figure, runs[OWN]))
        for chunk in CHUNKS:
            case = f"{concurrent} requests of {TOKENS} tokens, chunks of {chunk} by vLLM's own answer: {what}"
            mine = statistics.median(map(figure, runs[chunk]))
            want = "at least" if bars is THROUGHPUT_BARS else "at most"
            made.append(_common.compare(case, mine, own, bar=bars[chunk], want=want))
    return made


async def measure(fleet: Fleet, concurrent: int, rounds: int) -> dict[int, list[Run]]:
    """Every size's turn in each round."""
    runs: dict[int, list[Run]] = {chunk: [] for chunk in (OWN, *CHUNKS)}
    (status,) = await fleet.engines()
    (engine,) = [p for p in psutil.Process().children() if status.url.rpartition(":")[2] in p.cmdline()]
    clients = {
        chunk: DataClient(status.url, api_key=fleet.key_of(status.name), stream_chunk_tokens=chunk, routed=False)
        for chunk in runs
    }
    await turn(clients[OWN], engine, concurrent, 0)  # warms kernels up
    for number in range(rounds):
        for chunk in random.Random(number).sample(list(runs), len(runs)):
            runs[chunk].append(await turn(clients[chunk], engine, concurrent, 1000 * number))
            last = runs[chunk][-1]
            spent = f"{last.client_ms:.1f} ms of client and {last.engine_ms:.0f} ms of engine for 1000 tokens"
            what = f"chunks of {chunk}" if chunk != OWN else "vLLM's own answer"
            _common.note(f"round {number + 1}, {what}: {last.tokens_per_second:.0f} tokens/s, {spent}")
    for client in clients.values():
        await client.close()
    return runs


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--concurrent", type=int, default=64)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--profile", default="cpu")
    options.add_argument("--model", default=str(MODEL))
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made_up = args.model in _dummy_models.SHAPES
        async with Fleet.launch(
            _dummy_models.save(Path(folder), args.model) if made_up else args.model,
            1,
            profile=args.profile,
            load_format="dummy" if made_up else "auto",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=args.concurrent,
            kv_cache_memory_bytes=256 * 2**20 if args.profile == "cpu" else None,
            extra_args={"hf-overrides": json.dumps({"max_position_embeddings": MAX_MODEL_LEN})},
        ) as fleet:
            runs = await measure(fleet, args.concurrent, 1 if args.quick else args.rounds)
    return _common.report("chunk_overhead", rows(runs, args.concurrent))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
