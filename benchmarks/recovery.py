"""kill -9 of one of two real CPU engines under load: what it costs a fleet, and a plain client behind vllm-router.

    python benchmarks/recovery.py [--concurrent 64] [--kills 3]

Both sides have been through one weight update when the engine is killed, so that an engine that comes back as it was
loaded would serve the wrong weights. Every other request is a stream. On the peer's side the engine is started anew by
hand as soon as it has died, as a service manager would, and announced to vllm-router; the client sends plain requests,
and vllm-router repeats those that have no answer yet, as it does by default. A death of one side, then one of the
other: both are up all the time, and the one that waits does nothing. A token is wasted when an engine made it
and no answer has it; the dead engine's own count is read just before it is killed. Needs the extra `bench`. About seven
minutes, three with `--quick`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import _common
import _routers
import orjson
import psutil
import torch
from _closed_loop import ClosedLoop
from transformers import AutoModelForCausalLM

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.engine.client import GENERATE, DataClient
from penstock.engine.command import server_command
from penstock.engine.control import ControlClient
from penstock.engine.launch import EngineProcess
from penstock.engine.openai import COMPLETIONS
from penstock.engine.vanilla import report_of
from penstock.errors import EngineDeadError, PenstockError
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import State
from penstock.http import HttpTransport
from penstock.settings import EngineConfig
from penstock.types import SamplingParams
from penstock.weights.shared_memory import SharedMemoryStore

MODEL = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
TOKENS = (100, 200)
"""Fewest and most of an answer: were all of one length, they would end at once, and the moment of a kill count."""
CHUNK = 64
PEER_OPTIONS = ("--policy", "round_robin", "--worker-startup-check-interval", "1")
OPTIONS: dict[str, Any] = {"profile": "cpu", "max_model_len": 256, "max_num_seqs": 256}
LOOK_S = 0.01
ALL_THERE = 0.95
"""Share of the requests that has to be on the surviving engine; between two of its requests a client has none."""
ENGINE_SHARE = 0.6
"""Most of all requests that one of two engines has."""
WARM_S = 4.0
RETURN_S = 240.0
REQUEST_S = 120.0
AFTER_S = 5.0
"""Of load after the engine's return."""


@dataclass(frozen=True, slots=True)
class Death:
    """What one death cost; seconds since the kill."""

    failed: int
    wasted: int
    answers: int
    detect_s: float
    takeover_s: float
    return_s: float
    wrong_version: int
    """Answers with tokens of other weights than those in force, after the engine's return."""


Die = Callable[[int], Awaitable[Death]]
"""Brings in the weights of that number, and has one engine die under load."""


def request(i: int) -> tuple[list[int], SamplingParams]:
    """Prompt and parameters of request `i`."""
    tokens = TOKENS[0] + 37 * i % (TOKENS[1] - TOKENS[0] + 1)
    return [5 + i % 80, 6, 7], SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)


def stream_body(i: int) -> dict[str, Any]:
    """The same as an OpenAI body."""
    prompt, params = request(i)
    return {"model": str(MODEL), "prompt": prompt, "max_tokens": params.max_tokens, "ignore_eos": True}


def changed(seed: int) -> Any:
    """The model with other weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-4)
    return model


def kill(url: str) -> None:
    """SIGKILL to the process group of the engine at `url`, a child of ours."""
    port = url.rpartition(":")[2]
    for process in psutil.Process().children():
        line = process.cmdline()
        if "--port" in line and line[line.index("--port") + 1] == port:
            os.killpg(process.pid, signal.SIGKILL)
            return
    raise RuntimeError(f"there is no engine at {url}")


async def until(reached: Callable[[], Any], began: float, limit_s: float = RETURN_S) -> float:
    """Seconds since `began` when `await reached()` was true first."""
    async with asyncio.timeout(limit_s):
        while not await reached():  # noqa: ASYNC110 - engines and routers of others send no event
            await asyncio.sleep(LOOK_S)
    return time.perf_counter() - began


class Generated:
    """What the engines have made, those that are dead too."""

    def __init__(self) -> None:
        self._controls: dict[str, ControlClient] = {}
        self._last: dict[str, int] = {}

    async def total(self, *urls: str) -> int:
        """Tokens, with what engines at these URLs say now."""
        for url in urls:
            control = self._controls.setdefault(url, ControlClient(url, url))
            self._last[url] = (await control.verbs.stats()).generation_tokens
        return sum(self._last.values())

    async def on(self, url: str) -> int:
        """Requests on an engine."""
        stats = await self._controls[url].verbs.stats()
        return stats.running + stats.waiting

    async def close(self) -> None:
        """Close the connections."""
        for control in self._controls.values():
            await control.close()


# --- ours ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ours(concurrent: int) -> AsyncIterator[Die]:
    """A fleet."""
    with tempfile.TemporaryDirectory() as logs:
        async with Fleet.launch(
            str(MODEL), 2, stream_chunk_tokens=CHUNK, restart_backoff_s=0.1, max_restarts=1000, log_dir=logs, **OPTIONS
        ) as fleet:

            async def die(number: int) -> Death:
                await fleet.update_weights(changed(number).named_parameters())
                return await our_death(fleet, concurrent)

            yield die


async def our_death(fleet: Fleet, concurrent: int) -> Death:
    """One death under load, until the engine serves again."""
    survivor, victim = await fleet.engines()
    wanted = fleet.weight_version
    wrong = 0

    async def ask(i: int) -> int:
        nonlocal wrong
        if i % 2:
            (sample,) = await fleet.sample(request(i)[0], 1, request(i)[1])
            spans = [(span.version, span.end) for span in sample.spans]
        else:
            chunks = [chunk async for chunk in fleet.completion_stream(stream_body(i))]
            ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
            spans = [(int(span["version"]), span["end"]) for span in ends[-1]["weight_versions"]]
        wrong += {version for version, _ in spans} != {wanted}
        return spans[-1][1]

    async def noticed() -> bool:
        return (await fleet.engines())[1].state is not State.SERVING

    async def taken_over() -> bool:
        return await generated.on(survivor.url) >= ALL_THERE * concurrent

    async def back() -> bool:
        status = (await fleet.engines())[1]
        return status.state is State.SERVING and status.url != victim.url

    generated = Generated()
    before = await generated.total(survivor.url, victim.url)
    async with ClosedLoop(ask, concurrent) as loop:
        await asyncio.sleep(WARM_S)
        await generated.total(victim.url)
        began = time.perf_counter()
        kill(victim.url)
        detect_s = await until(noticed, began)
        takeover_s = await until(taken_over, began)
        return_s = await until(back, began)
        await asyncio.sleep(AFTER_S)
    (_, returned) = await fleet.engines()
    wasted = await generated.total(survivor.url, returned.url) - before - loop.received
    wrong += await serves_other_weights(returned.url, fleet.key_of(returned.name), wanted)
    await generated.close()
    return Death(len(loop.failed), wasted, loop.answers, detect_s, takeover_s, return_s, wrong)


async def serves_other_weights(url: str, api_key: str | None, wanted: int) -> int:
    """Ask one engine itself: 1 where its tokens are not of version `wanted`."""
    engine = DataClient(url, api_key=api_key, routed=False)
    try:
        (sample,) = await engine.sample(request(0)[0], 1, request(0)[1])
        return int(set(sample.versions()) != {wanted})
    finally:
        await engine.close()


# --- the peer --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def theirs(concurrent: int) -> AsyncIterator[Die]:
    """vllm-router, two engines, and somebody who starts the dead anew."""
    config = EngineConfig(model=str(MODEL), **OPTIONS)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = SharedMemoryStore()
        stack.callback(store.close)
        engines: list[EngineProcess] = await all_or_first_error(
            EngineProcess.launch(server_command(config), name=f"e{i}", log_dir=logs) for i in range(2)
        )
        stack.push_async_callback(lambda: all_or_first_error(engine.stop() for engine in engines))
        router = stack.enter_context(_routers.peer("vllm-router", (), *PEER_OPTIONS))
        http = HttpTransport(f"http://127.0.0.1:{router.port}")
        stack.push_async_callback(http.close)
        for engine in engines:
            await http.call("POST", f"/add_worker?{urlencode({'url': engine.url})}", b"", timeout_s=60.0)

        async def die(number: int) -> Death:
            manifest = store.publish(number + 1, changed(number).named_parameters())
            for engine in engines:
                control = ControlClient(engine.name, engine.url)
                await control.prepare_weights(manifest)
                await control.apply_weights(manifest.version)
                await control.close()
            return await their_death(http, engines, config, logs, concurrent, manifest.version)

        yield die


async def plain(http: HttpTransport, i: int) -> list[tuple[int, int]]:
    """Version and end of each span of one answer."""
    prompt, params = request(i)
    answer = await http.post(GENERATE, wire.generate_body(prompt, params), timeout_s=REQUEST_S)
    versions = wire.as_weight_versions(report_of(answer["choices"][0])["versions"])
    return [(int(span["version"]), span["end"]) for span in versions]


async def streamed(http: HttpTransport, i: int) -> list[tuple[int, int]]:
    """The same of a stream, which has to end with `[DONE]` and without an error event."""
    spans: list[tuple[int, int]] = []
    body = orjson.dumps({**stream_body(i), "stream": True})
    async with http.stream("POST", COMPLETIONS, body, timeout_s=REQUEST_S) as reply:
        async for line in reply.lines():
            if line.startswith(wire.COMMENT):
                (versions,) = orjson.loads(line[len(wire.COMMENT) :])["versions"]
                spans = [(version, end) for version, _, end in versions]
            elif line.startswith(b'data: {"error"'):
                raise EngineDeadError(line.decode())
            elif line.startswith(b"data: [DONE]"):
                return spans
    raise EngineDeadError("its stream broke off")


async def their_death(
    http: HttpTransport, engines: list[EngineProcess], config: EngineConfig, logs: Path, concurrent: int, wanted: int
) -> Death:
    """The same death."""
    survivor, victim = engines
    wrong, lost = 0, 0.0

    async def ask(i: int) -> int:
        nonlocal wrong, lost
        try:
            spans = await (plain(http, i) if i % 2 else streamed(http, i))
        except PenstockError:
            lost = time.perf_counter()
            await asyncio.sleep(0.1)  # a client that asks again at once would only count the same outage again
            raise
        wrong += {version for version, _ in spans} != {wanted}
        return spans[-1][1]

    async def taken_over() -> bool:
        return await generated.on(survivor.url) >= ALL_THERE * concurrent

    generated = Generated()
    before = await generated.total(survivor.url, victim.url)
    async with ClosedLoop(ask, concurrent) as loop:
        await asyncio.sleep(WARM_S)
        await generated.total(victim.url)
        began = lost = time.perf_counter()
        kill(victim.url)
        takeover_s = await until(taken_over, began)
        await victim.wait()
        engines[1] = returned = await EngineProcess.launch(server_command(config), name="e1", log_dir=logs)
        await http.call("POST", f"/add_worker?{urlencode({'url': returned.url})}", b"", timeout_s=60.0)
        return_s = time.perf_counter() - began
        await asyncio.sleep(AFTER_S)
    wasted = await generated.total(survivor.url, returned.url) - before - loop.received
    await generated.close()
    return Death(len(loop.failed), wasted, loop.answers, lost - began, takeover_s, return_s, wrong)


# --- both ------------------------------------------------------------------------------------------------------------


def rows(mine: list[Death], peers: list[Death], concurrent: int) -> list[_common.Row]:
    """What the bars are for; sums of counts, medians of seconds."""
    what = f"{len(mine)} deaths at {concurrent} in flight"

    def total(deaths: list[Death], name: str) -> float:
        return sum(getattr(death, name) for death in deaths)

    def median(deaths: list[Death], name: str) -> float:
        return statistics.median(getattr(death, name) for death in deaths)

    made = [
        _common.single(f"{what}: failed requests", total(mine, "failed"), bar=0, want="at most"),
        _common.single(f"{what}: answers of other weights", total(mine, "wrong_version"), bar=0, want="at most"),
        _common.single(
            f"{what}: wasted tokens a death (at most a chunk of {CHUNK} of each request on the engine)",
            total(mine, "wasted") / len(mine), bar=CHUNK * concurrent * ENGINE_SHARE, want="at most",
        ),
        _common.single(f"{what}: seconds to detect", median(mine, "detect_s"), bar=1.0, want="at most"),
        _common.single(f"{what}: seconds to take over", median(mine, "takeover_s"), bar=5.0, want="at most"),
        _common.single(
            f"{what}: seconds to serve again, at the right version", median(mine, "return_s"), bar=120.0, want="at most"
        ),
    ]  # fmt: skip
    for name, bar in (("failed", 0.0), ("wrong_version", 0.0), ("wasted", 0.5)):
        if total(peers, name) > 0:
            case = f"{what}: {name.replace('_', ' ')}, by vllm-router's"
            made.append(_common.compare(case, total(mine, name), total(peers, name), bar=bar, want="at most"))
    for name in ("takeover_s", "return_s"):
        case = f"{what}: {name.removesuffix('_s')} seconds, by vllm-router's with an engine started by hand"
        made.append(_common.compare(case, median(mine, name), median(peers, name), bar=1.5, want="at most"))
    return made


async def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--concurrent", type=int, default=64)
    options.add_argument("--kills", type=int, default=3)
    args = options.parse_args()
    kills = 1 if args.quick else args.kills
    mine: list[Death] = []
    peers: list[Death] = []
    async with ours(args.concurrent) as fleet, theirs(args.concurrent) as router:
        for number in range(kills):
            mine.append(await fleet(number))
            _common.note(f"ours: {mine[-1]}")
            peers.append(await router(number))
            _common.note(f"vllm-router: {peers[-1]}")
    return _common.report("recovery", rows(mine, peers, args.concurrent))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
