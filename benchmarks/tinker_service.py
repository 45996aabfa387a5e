"""The Tinker service as its SDK sees it: sampling, training and putting new weights on the engines.

python benchmarks/tinker_service.py [--model PATH] [--profile cpu] [--tokens 32] [--parts training,sync] [--quick]

samples/s: `asample` of `--tokens` at 1, 64 and 512 under way, through the SDK, against the same prompts straight to the
fleet's router, both from this process: the SDK's own cost is part of ours, and is named apart: the SDK's rate against a
stub that answers at once (`_tinker_stub.py`). retrieve_future: polls for each sample.
tokens/s: `forward_backward` and `optim_step` against a plain peft loop in this process, with as many threads. sync:
from `save_weights_for_sampler` to the first token under the new weights.

It is not called tinker.py, since Python would then import it in place of the SDK.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import _common
import httpx
import torch

import tinker
from penstock import Fleet
from penstock.config import EngineConfig, FleetConfig, RouterConfig, TrainConfig
from penstock.tinker.service import Service, ServiceConfig, serving
from tinker import types

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
BASE = "base"
PARTS = ("sampling", "training", "sync")
RANK = 16
SAMPLES_BAR, TRAINING_BAR, POLLS_BAR, SYNC_BAR_S = 0.85, 0.9, 1.2, 0.3
PROMPT = list(range(5, 21))
SAMPLES = {True: ((1, 8), (64, 128)), False: ((1, 64), (64, 1024), (512, 2048))}
"""Samples under way and in all, where it is to be quick and where not."""
polls: Counter[str] = Counter()
"""Requests of the SDK, by the last part of their path."""


def count_requests() -> None:
    """Have every request of this process's httpx clients counted."""
    send = httpx.AsyncClient.send

    async def counted(self: Any, request: httpx.Request, **options: Any) -> httpx.Response:
        polls[request.url.path.rpartition("/")[2]] += 1
        return await send(self, request, **options)

    httpx.AsyncClient.send = counted  # pyright: ignore[reportAttributeAccessIssue]


async def rate(one: Callable[[], Awaitable[Any]], width: int, total: int) -> tuple[float, list[float]]:
    """Calls a second with `width` under way, and the seconds of each."""
    took: list[float] = []
    left = iter(range(total))

    async def work() -> None:
        for _ in left:
            began = time.perf_counter()
            await one()
            took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(width)))
    return total / (time.perf_counter() - began), took


@asynccontextmanager
async def stub(tokens: int) -> AsyncGenerator[str]:
    """Run the stub in a process of its own; gives its URL."""
    script = Path(__file__).with_name("_tinker_stub.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(tokens), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None  # noqa: S101
        async with asyncio.timeout(60.0):
            url = (await process.stdout.readline()).decode().strip()
        yield url
    finally:
        process.kill()
        await process.wait()


async def sdk_alone(tokens: int, *, quick: bool) -> list[_common.Row]:
    """Rows of samples a second that the SDK takes where the service costs next to nothing; no bar is ours."""
    rows: list[_common.Row] = []
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=tokens, stop=[])
    async with stub(tokens) as url:
        client = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
        sampler = await client.create_sampling_client(base_model=BASE)
        for width, total in SAMPLES[quick]:
            found, _ = await rate(lambda: sampler.sample(prompt, 1, params), width, total)
            _common.note(f"the SDK alone, {width} under way: {found:.1f} samples/s")
            rows.append(_common.single(f"samples/s of the SDK alone, {width} under way", found, bar=0, want="at least"))
        await client.close("success")
    return rows


async def sampling(service: Service, client: tinker.ServiceClient, tokens: int, *, quick: bool) -> list[_common.Row]:
    """Rows of samples a second, and of polls."""
    rows: list[_common.Row] = []
    sampler = await client.create_sampling_client(base_model=BASE)
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=tokens, stop=[])
    straight = {"max_tokens": tokens, "ignore_eos": True}
    async with Fleet.connect(service.fleet.url) as fleet:
        for width, total in SAMPLES[quick]:
            polls.clear()
            ours, took = await rate(lambda: sampler.sample(prompt, 1, params), width, total)
            each = polls["retrieve_future"] / total
            peer, _ = await rate(lambda: fleet.sample(PROMPT, 1, straight), width, total)
            took.sort()
            p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
            _common.note(
                f"{width} under way: {ours:.1f} samples/s (straight {peer:.1f}), p50 {p50:.3f} p99 {p99:.3f} s"
            )
            rows.append(_common.compare(f"samples/s, {width} under way", ours, peer, bar=SAMPLES_BAR, want="at least"))
            rows.append(_common.single(f"retrieve_future a sample, {width}", each, bar=POLLS_BAR, want="at most"))
    return rows


def data_of(count: int, length: int) -> list[types.Datum]:
    """Random sequences without repeats from one call to the next."""
    rows = torch.randint(4, 90, (count, length + 1), generator=torch.Generator().manual_seed(count)).tolist()
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
        for row in rows
    ]


def training(client: tinker.ServiceClient, model: str, threads: int | None, *, quick: bool) -> list[_common.Row]:
    """Tokens a second of steps, against a plain loop over the same data."""
    steps, count, length = (2, 4, 64) if quick else (6, 64, 256)
    data = data_of(count, length)
    mine = client.create_lora_training_client(BASE, rank=RANK, train_unembed=False).result()

    def ours() -> None:
        evaluated = mine.forward_backward(data, "cross_entropy")
        stepped = mine.optim_step(types.AdamParams(learning_rate=1e-4))
        evaluated.result()
        stepped.result()

    theirs = plain_step(model, data, threads)
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(steps):  # turn by turn, so that what else the machine does meets both
        for name, work in (("ours", ours), ("plain", theirs)):
            began = time.perf_counter()
            work()
            found[name].append(count * length / (time.perf_counter() - began))
    _common.note(f"training tokens/s of each step: {found}")
    mid = {name: statistics.median(rates[1:]) for name, rates in found.items()}
    return [_common.compare("training tokens/s", mid["ours"], mid["plain"], bar=TRAINING_BAR, want="at least")]


def plain_step(model: str, data: list[types.Datum], threads: int | None) -> Callable[[], None]:
    """A step of peft and transformers as their documentation writes it: one padded batch of equal lengths."""
    import peft  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=names))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-4)
    batches = [
        (
            torch.tensor([d.model_input.to_ints() for d in data[at : at + 16]], device=device),
            torch.tensor([d.loss_fn_inputs["target_tokens"].data for d in data[at : at + 16]], device=device),
        )
        for at in range(0, len(data), 16)
    ]

    def step() -> None:
        for tokens, targets in batches:
            logits = tuned(tokens).logits.float()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def syncing(client: tinker.ServiceClient, *, quick: bool) -> list[_common.Row]:
    """Seconds from the request to save to the first token of the new weights."""
    training_client = client.create_lora_training_client(BASE, rank=RANK, train_unembed=False).result()
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1, stop=[])
    saves, took = [], []
    for _ in range(2 if quick else 10):
        training_client.forward_backward(data_of(2, 32), "cross_entropy").result()
        training_client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
        began = time.perf_counter()
        sampler = training_client.save_weights_and_get_sampling_client().result()
        saves.append(time.perf_counter() - began)
        sampler.sample(prompt, 1, params).result()
        took.append(time.perf_counter() - began)
    _common.note(f"until saved, s: {saves}; until the first token: {took}")
    return [_common.single("sync to first token, s", statistics.median(took), bar=SYNC_BAR_S, want="at most")]


async def measured(arguments: Any) -> list[_common.Row]:
    """All rows."""
    engine = EngineConfig(model=arguments.model, profile=arguments.profile, served_model_name=BASE, max_model_len=512)
    train = TrainConfig(threads=arguments.threads)
    with tempfile.TemporaryDirectory(prefix="tinker-") as data:
        config = ServiceConfig(engine, FleetConfig(engines=arguments.engines), RouterConfig(), train, Path(data))
        async with serving(config) as service:
            client = tinker.ServiceClient(base_url=service.url, api_key="tml-benchmark")
            rows: list[_common.Row] = []
            quick, parts = arguments.quick, arguments.parts.split(",")
            if "sampling" in parts:
                rows += await sdk_alone(arguments.tokens, quick=quick)
                rows += await sampling(service, client, arguments.tokens, quick=quick)
            if "training" in parts:
                rows += await asyncio.to_thread(training, client, arguments.model, arguments.threads, quick=quick)
            if "sync" in parts:
                rows += await asyncio.to_thread(syncing, client, quick=quick)
            return rows


def main() -> int:
    """Measure, and print the document."""
    options = _common.parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--model", default=str(MODEL))
    options.add_argument("--profile", default="cpu", choices=["cpu", "gpu", "sim"])
    options.add_argument("--tokens", type=int, default=32, help="of a sample")
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument("--engines", type=int, default=1)
    options.add_argument("--threads", type=int, default=1, help="of the learner and of the plain loop, on CPUs")
    arguments = options.parse_args()
    count_requests()
    rows = asyncio.run(measured(arguments))
    return _common.report("tinker", rows, profile=arguments.profile, engines=arguments.engines)


if __name__ == "__main__":
    sys.exit(main())
