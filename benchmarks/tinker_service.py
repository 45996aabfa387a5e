"""The Tinker service as its SDK sees it: sampling, training and putting new weights on the engines.

python benchmarks/tinker_service.py [--model 0.6b] [--profile gpu] [--parts sampling,training] [--out FILE] [--quick]

sampling: `asample` of `--tokens` with 1, 64 and 512 under way, against the same prompts straight to the fleet's router,
both from this process, turn by turn. The bar is for the SDK's two requests sent by a plain HTTP client. The SDK itself
is measured too, against the service and against a stub that answers at once (`_tinker_stub.py`), which is its own cost.
training: `forward_backward` and `optim_step` by the SDK, against a plain peft loop in this process, turn by turn. The
bar is for what is left of a step without the time of the SDK's own step, which is measured against the stub.
sync: from `save_weights_and_get_sampling_client` to the first token under the new weights.

SIGTERM, or a limit of time, ends it early; what was measured until then is printed, and stands in `--out` all along.
It is not called tinker.py, since Python would then import it in place of the SDK.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import _common
import _dummy_models
import aiohttp
import httpx
import orjson
import torch

import tinker
from penstock import Fleet
from penstock.config import EngineConfig, FleetConfig, RouterConfig, TrainConfig
from penstock.tinker.schema import pb
from penstock.tinker.service import Service, ServiceConfig, serving
from tinker import types

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
BASE, KEY = "base", "tml-benchmark"
PARTS = ("sampling", "training", "sync")
RANK = 16
SAMPLES_BAR, TRAINING_BAR, POLLS_BAR, SYNC_BAR_S = 0.85, 0.9, 1.2, 0.3
PROMPT = list(range(5, 21))
SAMPLES = {True: ((1, 8), (64, 128)), False: ((1, 16), (64, 512), (512, 2048))}
"""Samples under way and in all, where it is to be quick and where not."""
ROUNDS = 3
polls: Counter[str] = Counter()
"""Requests of the SDK, by the last part of their path."""
Side = Callable[[], Awaitable[Any]]


class Findings:
    """The rows that were measured, kept in a file as they come."""

    def __init__(self, benchmark: str, out: Path | None, **beside: Any) -> None:
        self.benchmark, self.out, self.beside = benchmark, out, beside
        self.rows: list[_common.Row] = []

    def add(self, *rows: _common.Row, **beside: Any) -> None:
        """Keep rows, and what shall stand beside them."""
        self.rows += rows
        self.beside |= beside
        for row in rows:
            _common.note(f"{row.case}: {row.ours:.4g}" + ("" if row.ratio is None else f", ratio {row.ratio:.3f}"))
        if self.out is not None:
            document = {**_common.document(self.benchmark, self.rows), **self.beside}
            self.out.write_text(json.dumps(document, indent=2))

    def report(self, *, whole: bool) -> int:
        """Print the document; the exit status."""
        self.add(whole=whole)
        return max(_common.report(self.benchmark, self.rows, **self.beside), int(not whole))


def parser(description: str, parts: str) -> Any:
    """A parser of the options that benchmarks of the service share; `parts` are measured by default."""
    options = _common.parser(description.partition("\n")[0])
    options.add_argument("--model", default=str(MODEL), help=f"folder, or one of {', '.join(_dummy_models.SHAPES)}")
    options.add_argument("--profile", default="cpu", choices=["cpu", "gpu", "sim"])
    options.add_argument("--engines", type=int, default=1)
    options.add_argument("--threads", type=int, default=1, help="of the learner and of the plain loop, on CPUs")
    options.add_argument("--eager", action="store_true", help="engines on GPUs start sooner, and compile nothing")
    options.add_argument("--gpu-memory", type=float, help="the engine's share of a GPU's memory")
    options.add_argument("--tokens", type=int, default=32, help="of a sample")
    options.add_argument("--widths", default="1,64,512", help="of these, samples under way")
    options.add_argument("--parts", default=parts, help=f"of {', '.join(PARTS)}, one after another")
    options.add_argument("--out", type=Path, help="the document is kept here as it grows")
    return options


def model_in(folder: Path, model: str) -> str:
    """The folder of a model; one of made-up shapes is written, with random weights."""
    if model not in _dummy_models.SHAPES:
        return model
    from safetensors.torch import save_file  # noqa: PLC0415

    path = _dummy_models.save(folder, model)
    chance = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if "norm" in name
        else torch.randn(shape, generator=chance).mul_(0.02).bfloat16()
        for name, shape in _dummy_models.shapes(path)
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@asynccontextmanager
async def service_of(arguments: Any, longest: int, keys: str | None = None) -> AsyncGenerator[tuple[Service, str]]:
    """Run a service while the block runs; gives it, and the folder of its model."""
    with tempfile.TemporaryDirectory(prefix="tinker-") as folder:
        model = model_in(Path(folder), arguments.model)
        file = Path(folder) / "keys.yaml"
        if keys is not None:
            file.touch(mode=0o600)
            file.write_text(keys)
        memory = {} if arguments.gpu_memory is None else {"gpu_memory_utilization": arguments.gpu_memory}
        engine = EngineConfig(
            model=model,
            profile=arguments.profile,
            served_model_name=BASE,
            max_model_len=longest,
            enforce_eager=arguments.eager,
            **memory,
        )
        config = ServiceConfig(
            engine,
            FleetConfig(engines=arguments.engines),
            RouterConfig(),
            TrainConfig(threads=arguments.threads),
            Path(folder) / "data",
            keys=None if keys is None else file,
        )
        _common.note("the service starts")
        async with serving(config) as service:
            yield service, model


# --- sampling --------------------------------------------------------------------------------------------------------


def count_requests() -> None:
    """Have every request of this process's httpx clients counted."""
    send = httpx.AsyncClient.send

    async def counted(self: Any, request: httpx.Request, **options: Any) -> httpx.Response:
        polls[request.url.path.rpartition("/")[2]] += 1
        return await send(self, request, **options)

    httpx.AsyncClient.send = counted  # pyright: ignore[reportAttributeAccessIssue]


async def rate(one: Side, width: int, total: int) -> tuple[float, list[float]]:
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
async def stub(tokens: int, data: int = 1, length: int = 1) -> AsyncGenerator[str]:
    """Run the stub in a process of its own; gives its URL."""
    script, sizes = Path(__file__).with_name("_tinker_stub.py"), map(str, (tokens, data, length))
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), *sizes, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None  # noqa: S101
        async with asyncio.timeout(60.0):
            url = (await process.stdout.readline()).decode().strip()
        yield url
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def plain_client(url: str, tokens: int) -> AsyncGenerator[Side]:
    """Gives what takes a sample with the SDK's two requests, and next to nothing besides."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"{url}/api/v1/", headers={"X-API-Key": KEY}, connector=connector) as http:

        async def post(path: str, body: Any) -> bytes:
            headers = {"Content-Type": "application/json"}
            async with http.post(path, data=orjson.dumps(body), headers=headers) as answer:
                data = await answer.read()
                assert answer.status == 200, data  # noqa: S101
                return data

        session = orjson.loads(await post("create_session", {"tags": [], "sdk_version": tinker.__version__}))
        created = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = orjson.loads(await post("create_sampling_session", created))["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": tokens, "stop": []},
        }
        numbers = itertools.count(1)

        async def sample() -> None:
            request = orjson.loads(await post("asample", body | {"seq_id": next(numbers)}))["request_id"]
            (found,) = pb.SampleResponse.FromString(await post("retrieve_future", {"request_id": request})).sequences
            assert len(found.tokens) == 4 * tokens  # noqa: S101

        yield sample


async def sampling(service: Service, arguments: Any, found: Findings) -> None:
    """Rows of samples a second, and of polls."""
    tokens: int = arguments.tokens
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=tokens, stop=[])
    straight = {"max_tokens": tokens, "ignore_eos": True}
    client = tinker.ServiceClient(base_url=service.url, api_key=KEY)
    sampler = await client.create_sampling_client(base_model=BASE)
    async with Fleet.connect(service.fleet.url) as fleet, plain_client(service.url, tokens) as plain:
        sides: dict[str, Side] = {
            "service": plain,
            "straight": lambda: fleet.sample(PROMPT, 1, straight),
            "SDK": lambda: sampler.sample(prompt, 1, params),
        }
        async with stub(tokens) as url:
            against_stub = tinker.ServiceClient(base_url=url, api_key=KEY)
            stubbed = await against_stub.create_sampling_client(base_model=BASE)
            sides["SDK alone"] = lambda: stubbed.sample(prompt, 1, params)
            for width, total in SAMPLES[arguments.quick]:
                if str(width) not in arguments.widths.split(","):
                    continue
                rounds = 1 if arguments.quick else ROUNDS
                await at_width(sides, width, total, rounds, service.api.pid, found)
            await against_stub.close("success")
    await client.close("success")


def processor_s(pid: int | str) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def at_width(sides: dict[str, Side], width: int, total: int, rounds: int, api: int, found: Findings) -> None:
    """Rows of all sides with so many samples under way."""
    rates: dict[str, list[float]] = defaultdict(list)
    took: dict[str, list[float]] = defaultdict(list)
    polled, used = 0.0, list[float]()
    for one in sides.values():  # connections, and the engine's first batch of this size
        await rate(one, width, width)
    for _ in range(rounds):  # turn by turn, so that what else the machine does meets all
        for name, one in sides.items():
            if name == "SDK":
                polls.clear()
            before = processor_s(api)
            speed, seconds = await rate(one, width, total)
            if name == "service":
                used.append((processor_s(api) - before) / total * 1000)
            if name == "SDK":
                polled = polls["retrieve_future"] / total
            rates[name].append(speed)
            took[name] += seconds
    mid = {name: statistics.median(speeds) for name, speeds in rates.items()}
    shown = {
        name: {"p50": statistics.median(all_), "p99": sorted(all_)[int(len(all_) * 0.99)], "rates": rates[name]}
        for name, all_ in took.items()
    }
    at = f"{width} under way"
    found.add(
        _common.compare(f"samples/s, {at}", mid["service"], mid["straight"], bar=SAMPLES_BAR, want="at least"),
        _common.compare(f"samples/s through the SDK, {at}", mid["SDK"], mid["straight"], bar=0, want="at least"),
        _common.single(f"samples/s of the SDK alone, {at}", mid["SDK alone"], bar=0, want="at least"),
        _common.single(
            f"processor ms of the API process a sample, {at}", statistics.median(used), bar=0, want="at least"
        ),
        _common.single(f"retrieve_future a sample, {at}", polled, bar=POLLS_BAR, want="at most"),
        **{f"seconds, {at}": shown},
    )


# --- training --------------------------------------------------------------------------------------------------------


def data_of(count: int, length: int) -> list[types.Datum]:
    """Random sequences without repeats from one call to the next."""
    rows = torch.randint(4, 90, (count, length + 1), generator=torch.Generator().manual_seed(count)).tolist()
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:]})
        for row in rows
    ]


async def sdk_step(client: Any, data: list[types.Datum]) -> None:
    """A step by the SDK, whose two operations are under way together."""
    evaluated = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-4))
    await evaluated
    await stepped


async def training(client: tinker.ServiceClient, service: Service, model: str, arguments: Any, found: Findings) -> None:
    """Rows of tokens a second of steps, against a plain loop over the same data, and of processor time.

    The processor time of learner and API says what steps cost where other work has a share of the processors.
    """
    options: dict[str, Any] = {"rank": RANK, "train_unembed": False}
    for count, length in ((4, 64),) if arguments.quick else ((64, 256), (4, 64)):
        data = data_of(count, length)
        mine = await client.create_lora_training_client(BASE, **options)
        theirs = await asyncio.to_thread(plain_step, model, data, arguments.threads)
        async with stub(1, count, length) as url:
            against_stub = tinker.ServiceClient(base_url=url, api_key=KEY)
            stubbed = await against_stub.create_lora_training_client(BASE, **options)
            sides: dict[str, tuple[Side, tuple[int | str, ...]]] = {
                "ours": (lambda mine=mine, data=data: sdk_step(mine, data), (service.learner.pid, service.api.pid)),
                "plain": (lambda theirs=theirs: asyncio.to_thread(theirs), ("self",)),
                "SDK alone": (lambda stubbed=stubbed, data=data: sdk_step(stubbed, data), ("self",)),
            }
            took, used = await steps_of(sides, 7 if count > 4 else 9 if arguments.quick else 25)
            await against_stub.close("success")
        add_training(found, count, length, took, used, gpu=arguments.profile == "gpu")


async def steps_of(
    sides: dict[str, tuple[Side, tuple[int | str, ...]]], steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each side's steps, and processor seconds of its processes; the first step of each is left out."""
    took: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):  # turn by turn, so that what else the machine does meets all
        for name, (one, pids) in sides.items():
            before, began = sum(map(processor_s, pids)), time.perf_counter()
            await one()
            took[name].append(time.perf_counter() - began)
            used[name].append(sum(map(processor_s, pids)) - before)
    return {name: each[1:] for name, each in took.items()}, {name: each[1:] for name, each in used.items()}


def add_training(
    found: Findings, count: int, length: int, took: dict[str, list[float]], used: dict[str, list[float]], *, gpu: bool
) -> None:
    """Rows of one size."""
    tokens, mid = count * length, {name: statistics.median(each) for name, each in took.items()}
    sizes = f"{count} sequences of {length}"
    left = max(mid["ours"] - mid["SDK alone"], 1e-9)
    rows = [
        _common.compare(
            f"training tokens/s without the SDK's own time, {sizes}", tokens / left, tokens / mid["plain"],
            bar=TRAINING_BAR, want="at least",
        ),
        _common.compare(
            f"training tokens/s through the SDK, {sizes}", tokens / mid["ours"], tokens / mid["plain"], bar=0,
            want="at least",
        ),
        _common.single(
            f"training tokens/s of the SDK alone, {sizes}", tokens / mid["SDK alone"], bar=0, want="at least"
        ),
    ]  # fmt: skip
    if not gpu:
        each = {name: tokens * len(seconds) / max(sum(seconds), 0.01) for name, seconds in used.items()}
        busy = f"training tokens a processor second, {sizes}"
        rows.append(_common.compare(busy, each["ours"], each["plain"], bar=TRAINING_BAR, want="at least"))
    found.add(*rows, **{f"seconds of each step, {sizes}": took})


def plain_step(model: str, data: list[types.Datum], threads: int | None) -> Callable[[], None]:
    """A step of peft and transformers as their documentation writes it: one padded batch of equal lengths."""
    import peft  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    base.to(device)
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


# --- new weights -----------------------------------------------------------------------------------------------------


async def syncing(client: tinker.ServiceClient, arguments: Any, found: Findings) -> None:
    """A row of seconds from the request to save to the first token of the new weights."""
    training_client = await client.create_lora_training_client(BASE, rank=RANK, train_unembed=False)
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1, stop=[])
    saves: list[float] = []
    took: list[float] = []
    for _ in range(6 if arguments.quick else 11):
        evaluated = training_client.forward_backward(data_of(2, 32), "cross_entropy")
        await training_client.optim_step(types.AdamParams(learning_rate=1e-4))
        await evaluated
        began = time.perf_counter()
        sampler = await training_client.save_weights_and_get_sampling_client()
        saves.append(time.perf_counter() - began)
        await sampler.sample(prompt, 1, params)
        took.append(time.perf_counter() - began)
    row = _common.single("sync to first token, s", statistics.median(took[1:]), bar=SYNC_BAR_S, want="at most")
    found.add(row, **{"until saved, s": saves, "until the first token, s": took})


async def measured(service: Service, model: str, arguments: Any, found: Findings) -> None:
    """All rows, one part after another, in the order that `--parts` names."""
    client = tinker.ServiceClient(base_url=service.url, api_key=KEY)
    for part in filter(None, arguments.parts.split(",")):
        if part == "sampling":
            await sampling(service, arguments, found)
        elif part == "sync":
            await syncing(client, arguments, found)
        elif part == "training":
            await training(client, service, model, arguments, found)
    await client.close("success")


def main() -> int:
    """Measure, and print the document."""
    arguments = parser(__doc__ or "", ",".join(PARTS)).parse_args()
    count_requests()

    async def work() -> None:
        async with service_of(arguments, 512) as (service, model):
            await measured(service, model, arguments, found)

    found = Findings("tinker", arguments.out, profile=arguments.profile, engines=arguments.engines)
    return found.report(whole=asyncio.run(_common.until_ended(work())))


if __name__ == "__main__":
    sys.exit(main())
