"""What tests over fleets of simulated engines share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil

from patience import WAIT_S, asked
from penstock import Fleet, GenerateOutput, Sample, SamplingParams
from penstock.engine.control import ControlClient
from penstock.engine.launch import EngineProcess
from penstock.errors import EngineDeadError
from penstock.fleet.member import SERVABLE, Member, State
from penstock.http import HttpTransport
from penstock.router.server import Router
from sim_verify import verify

CONTEXT = 512
SIM: dict[str, Any] = {
    "profile": "sim",
    "max_model_len": CONTEXT,
    "control_timeout_s": WAIT_S,
    "extra_args": {"tokens-per-second": 500},
}
"""Options of a fleet of simulated engines: two milliseconds a token."""

LONG = SamplingParams(max_tokens=300, detokenize=False)
SHORT = SamplingParams(max_tokens=8, detokenize=False)


@asynccontextmanager
async def router_here(*config: Any, **keys: str) -> AsyncIterator[Router]:
    """A router in this process, which starts in no time."""
    router = Router(*config, **keys)
    await router.start()
    try:
        yield router
    finally:
        await router.close()


def samples_of(out: GenerateOutput) -> list[Sample]:
    assert out.response_logprobs is not None
    parts = zip(
        out.response_ids, out.stop_reasons, out.response_logprobs, out.response_spans, out.responses, strict=True
    )
    return [Sample(*part) for part in parts]


def check(prompts: Sequence[Sequence[int]], out: GenerateOutput, params: SamplingParams) -> None:
    """Invariant 2, and that every token and logprob is that of its prompt, position and claimed weight version."""
    samples = samples_of(out)
    assert len(samples) == len(prompts) * params.n
    for i, sample in enumerate(samples):
        prompt = prompts[i // params.n]
        assert verify(prompt, sample, params=params, context=CONTEXT) == [], f"sample {i} of prompt {prompt}"


async def check_serves(fleet: Fleet, *, engines: int) -> None:
    """It serves at its version, on so many engines."""
    params = SamplingParams(max_tokens=4)
    prompts = [[7, 8, i] for i in range(1, 9)]
    out = await asyncio.wait_for(fleet.generate(prompt_token_ids=prompts, sampling_params=params), WAIT_S)
    check(prompts, out, params)
    assert {span.version for spans in out.response_spans for span in spans} == {fleet.weight_version}
    statuses = await fleet.engines()
    live = [status for status in statuses if status.state is State.SERVING]
    assert len(live) == engines, statuses
    assert all(status.weight_version == fleet.weight_version for status in live)


async def all_serve(fleet: Fleet) -> None:
    """Return when every engine is back; each serves the fleet's version then."""
    members = fleet._roster.members
    assert await fleet._roster.until(lambda: all(m.state is State.SERVING for m in members), deadline_s=WAIT_S), members
    await check_serves(fleet, engines=len(members))


def broadcast(fleet: Fleet) -> Any:
    """Its store of that kind."""
    return fleet._operations._store.of("broadcast")  # type: ignore[attr-defined]


async def made(fleet: Fleet) -> dict[str, int]:
    """Tokens that each engine has made since it started."""
    return {s.name: s.stats.generation_tokens for s in await fleet.engines() if s.stats is not None}


async def generated(fleet: Fleet, tokens: int) -> None:
    """Return when its engines have made so many tokens more."""
    before = sum((await made(fleet)).values())
    await asked(lambda: made(fleet), lambda now: sum(now.values()) >= before + tokens)


async def in_flight(fleet: Fleet, reached: Callable[[int], bool]) -> None:
    """Return when `reached` of the number of requests on the engines."""
    await asked(fleet.get_num_unfinished_requests, reached)


async def begun(
    fleet: Fleet, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> asyncio.Task[GenerateOutput]:
    """Ask for a batch, and return when every request of it is on an engine, with nothing else; see `slowed`."""
    running = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=params, **options))
    await in_flight(fleet, lambda requests: requests == len(prompts) * params.n)
    return running


async def under_way(
    fleet: Fleet, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> asyncio.Task[GenerateOutput]:
    """Do as `begun`, on engines that are slow until it returns."""
    async with slowed(fleet):
        return await begun(fleet, prompts, params, **options)


async def whole(
    running: asyncio.Task[GenerateOutput], prompts: Sequence[Sequence[int]], params: SamplingParams
) -> GenerateOutput:
    """Return the answer to a batch, of which nothing is missing and every token is right."""
    out = await asyncio.wait_for(running, WAIT_S)
    check(prompts, out, params)
    return out


async def stepped(fleet: Fleet, tokens: int) -> None:
    """Return when each of its engines has made so many tokens more."""
    before = await made(fleet)
    await asked(lambda: made(fleet), lambda now: all(now[name] >= before.get(name, 0) + tokens for name in now))


@asynccontextmanager
async def slowed(fleet: Fleet, factor: float = 100.0) -> AsyncIterator[None]:
    """Let its engines take 0.2 s for a token in this block: what is in flight stays so on a busy machine too."""
    await _speed(fleet, factor)
    try:
        yield
    finally:
        await _speed(fleet, 1.0)


async def _speed(fleet: Fleet, factor: float) -> None:
    for member in fleet._roster.members:
        if member.state in SERVABLE:
            with suppress(EngineDeadError):
                await set_fault(member, kind="slow", factor=factor)


async def set_fault(member: Member, **fault: object) -> None:
    """Set a fault on a simulated engine."""
    http = HttpTransport(member.url, api_key=member.api_key)
    try:
        await http.post("/sim/fault", fault, timeout_s=WAIT_S)
    finally:
        await http.close()


def core_of(pid: int) -> int:
    """The process that holds an engine's core: a child of the server, or the server itself."""
    inside = [p for p in psutil.Process(pid).children() if "resource_tracker" not in " ".join(p.cmdline())]
    return inside[-1].pid if inside else pid


def strike(member: Member, number: int = signal.SIGKILL) -> None:
    """Send a signal to all processes of a launched engine."""
    assert isinstance(member.process, EngineProcess)
    os.killpg(member.process.pid, number)


async def returned(fleet: Fleet, member: Member, before: int) -> None:
    """Return when it has died and serves again; `before`: length of its history before that."""

    def back() -> bool:
        return len(member.lifecycle.history) > before and member.state is State.SERVING

    assert await fleet._roster.until(back, deadline_s=WAIT_S), member.lifecycle.history


def impatient(member: Member, deadline_s: float = 0.5) -> None:
    """Let no call to this engine take longer, until it is started anew.

    It is the one that hangs: a deadline so short for the others would end those too when the machine stands still.
    """
    control = member.control
    assert isinstance(control, ControlClient)
    call = control.http.call

    async def cut_short(*request: Any, timeout_s: float, **options: Any) -> Any:
        return await call(*request, timeout_s=min(timeout_s, deadline_s), **options)

    control.http.call = cut_short


def children(kind: str) -> list[psutil.Process]:
    """Our child processes that run `python -m penstock.KIND`."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended, or a zombie
            if f"penstock.{kind}" in process.cmdline():
                found.append(process)
    return found


def router_process(url: str) -> psutil.Process:
    """The process of the router at `url`."""
    port = int(url.rpartition(":")[2])
    return _one("router", lambda p: port in {c.laddr.port for c in p.net_connections() if not c.raddr})


def engine_process(url: str) -> psutil.Process:
    """The process of the engine at `url`."""
    port = url.rpartition(":")[2]
    return _one("sim", lambda p: f"port={port}" in p.cmdline())


def _one(kind: str, is_it: Callable[[psutil.Process], bool]) -> psutil.Process:
    found: list[psutil.Process] = []
    for process in children(kind):
        with suppress(psutil.NoSuchProcess):  # another one ends meanwhile
            found += [process] if is_it(process) else []
    (process,) = found
    return process
