"""vllm-router in the place of ours, over simulated engines: what a fleet does goes on, and what it lacks is said."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from sim_fleets import SIM, check, check_serves, engine_process, in_flight, made

from penstock import Fleet, SamplingParams
from penstock.config import RouterConfig
from penstock.errors import ConfigError, EngineDeadError, EngineHTTPError, StateError, UserError
from penstock.fleet.lifecycle import State
from penstock.fleet.vllm_router import POLICIES, VllmRouterAdmin, VllmRouterProcess, command
from penstock.router.membership import EngineEntry
from penstock.router.server import Router
from penstock.sim import SimConfig, SimServer

installed = pytest.mark.skipif(
    find_spec("vllm_router") is None, reason="vllm-router is not installed (requirements/cpu.lock has it)"
)
PROMPTS = [[1 + i, 2, 3] for i in range(24)]
LONG = SamplingParams(max_tokens=400, detokenize=False)
SHORT = SamplingParams(max_tokens=5, detokenize=False)


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet.launch("sim-model", engines=3, kind="vllm-router", policy="consistent-hash", **SIM) as fleet:
        yield fleet


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[VllmRouterProcess]:
    router = await VllmRouterProcess.launch(RouterConfig(kind="vllm-router"), log_dir=tmp_path)
    yield router
    await router.stop()


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("layer.weight", torch.ones(4, 3))]


@installed
async def test_generates_completes_and_chats(fleet: Fleet) -> None:
    await check_serves(fleet, engines=3)
    answer = await fleet.completion({"model": "sim-model", "prompt": ["a", "b"], "max_tokens": 3, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    chat = {"model": "sim-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    assert (await fleet.chat_completion(chat))["usage"]["completion_tokens"] == 3
    text = await fleet.generate(prompts=["hello"], sampling_params=SamplingParams(max_tokens=4))
    assert len(text.responses[0]) == 4
    with pytest.raises(EngineHTTPError, match="maximum") as error:
        await fleet.generate(prompt_token_ids=[[5] * 600])
    assert error.value.status == 400


@installed
async def test_a_session_stays_on_one_engine_and_sessions_spread(fleet: Fleet) -> None:
    before = await made(fleet)
    for _ in range(5):
        await fleet.sample([8, 8], 1, SHORT, session_id="conversation")
    after = await made(fleet)
    assert sorted(after[name] - before[name] for name in after) == [0, 0, 25]
    await asyncio.gather(*(fleet.sample([8, 8], 1, SHORT, session_id=f"s{i}") for i in range(48)))
    spread = await made(fleet)
    assert all(spread[name] > after[name] for name in spread)


@installed
async def test_updates_under_load_lose_nothing_though_there_is_no_gate(fleet: Fleet) -> None:
    first = fleet.weight_version
    stop = asyncio.Event()

    async def arrivals() -> int:
        """What the gate of our router would hold: here it waits inside the engines."""
        served = 0
        while not stop.is_set():
            check([[9, 9]], await fleet.generate(prompt_token_ids=[[9, 9]], sampling_params=SHORT), SHORT)
            served += 1
        return served

    others = [asyncio.create_task(arrivals()) for _ in range(4)]
    running = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG))
    try:
        await in_flight(fleet, lambda requests: requests >= len(PROMPTS))
        for i in range(3):
            report = await fleet.update_weights(weights())
            assert report.version == first + 1 + i
            assert [update.engine for update in report.engines] == ["e0", "e1", "e2"]
            assert report.failures == {}
        out = await running
    finally:
        stop.set()
    assert min(await asyncio.gather(*others)) > 0
    check(PROMPTS, out, LONG)
    assert any(len(spans) > 1 for spans in out.response_spans), "no request was in flight during an update"


@installed
async def test_what_arrives_during_a_pause_waits_inside_the_engines(fleet: Fleet) -> None:
    await fleet.pause_generation()
    late = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=SHORT))
    await in_flight(fleet, lambda requests: requests == len(PROMPTS))
    before = await made(fleet)
    await asyncio.sleep(0.1)
    assert await made(fleet) == before, "no token is made while paused"
    assert not late.done()
    await fleet.resume_generation()
    check(PROMPTS, await late, SHORT)


@installed
async def test_an_engine_that_dies_leaves_its_workers_and_costs_no_request() -> None:
    async with Fleet.launch("sim-model", engines=3, kind="vllm-router", max_restarts=0, **SIM) as fleet:
        admin = VllmRouterAdmin(fleet.url)
        victim, *rest = await fleet.engines()
        assert await workers(admin) == {engine.url for engine in (victim, *rest)}
        running = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG))
        await in_flight(fleet, lambda requests: requests == len(PROMPTS))
        engine_process(victim.url).kill()
        await until_workers(admin, {engine.url for engine in rest})
        check(PROMPTS, await running, LONG)
        assert (await fleet.engines())[0].state is State.DEAD
        for i in range(12):  # wherever its sessions were
            await fleet.sample([8, 8], 1, SHORT, session_id=i)
        report = await fleet.update_weights(weights())
        assert [update.engine for update in report.engines] == ["e1", "e2"]
        await check_serves(fleet, engines=2)
        await admin.close()


@installed
async def test_an_engine_that_comes_back_is_a_worker_again_and_so_is_a_router() -> None:
    options = {"kind": "vllm-router", "restart_backoff_s": 0.05}
    async with Fleet.launch("sim-model", engines=2, **options, **SIM) as fleet:
        await fleet.update_weights(weights())
        admin = VllmRouterAdmin(fleet.url)
        victim, other = await fleet.engines()
        engine_process(victim.url).kill()
        await until_workers(admin, {other.url})
        async with asyncio.timeout(60):
            while len(await workers(admin)) < 2:  # noqa: ASYNC110 - it sends no event
                await asyncio.sleep(0.02)
        await check_serves(fleet, engines=2)
        lines = {process: process.cmdline() for process in psutil.Process().children()}
        (router,) = [process for process, line in lines.items() if str(urlsplit(fleet.url).port) in line]
        os.killpg(router.pid, signal.SIGKILL)
        await until_workers(admin, {engine.url for engine in await fleet.engines()})
        await check_serves(fleet, engines=2)
        await admin.close()


async def until_workers(admin: VllmRouterAdmin, urls: set[str]) -> None:
    async with asyncio.timeout(60):
        while True:
            with suppress(EngineDeadError):  # of a router that is on its way back
                if await workers(admin) == urls:
                    return
            await asyncio.sleep(0.02)


@installed
async def test_engines_ask_for_the_key_and_the_router_has_none() -> None:
    async with Fleet.launch("sim-model", engines=1, kind="vllm-router", api_key="secret", **SIM) as fleet:
        check(PROMPTS, await fleet.generate(prompt_token_ids=PROMPTS, sampling_params=SHORT), SHORT)
        answer = await fleet.completion({"model": "sim-model", "prompt": "a", "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] == 2
        with pytest.raises(EngineHTTPError) as error:  # it drops the key on every path but those that generate
            await fleet.generate(prompts=["text"])
        assert error.value.status == 401
        (engine,) = await fleet.engines()
        stranger = VllmRouterAdmin(fleet.url)._http
        for path, body in (("/v1/completions", b'{"model":"sim-model","prompt":"a"}'), ("/pause", b"{}")):
            with pytest.raises(EngineHTTPError) as error:
                await stranger.call("POST", path, body, timeout_s=30)
            assert error.value.status == 401, path
        await stranger.close()
        assert engine.state is State.SERVING
        lines = [process.cmdline() for process in psutil.Process().children(recursive=True)]
        ours = [line for line in lines if str(urlsplit(fleet.url).port) in line]
        assert len(ours) == 1, "of who ends it with us; vllm-router itself writes over its own"
        assert "secret" not in str(ours)


@installed
async def test_full_sets_become_workers_added_and_removed(router: VllmRouterProcess) -> None:
    async with SimServer(SimConfig()) as a, SimServer(SimConfig()) as b:
        admin, stranger = VllmRouterAdmin(router.url), VllmRouterAdmin(router.url)
        await stranger.set_engines(0, [EngineEntry("x", b.url)])
        first = [EngineEntry("a", a.url, 3)]
        await admin.set_engines(4, first)
        assert await workers(admin) == {a.url}, "the set is a full one"
        state = await admin.engines()
        assert (state.epoch, [(e.name, e.weight_version, e.eligible, e.down) for e in state.engines]) == (
            4, [("a", 3, True, False)]
        )  # fmt: skip
        await admin.set_engines(4, first)
        with pytest.raises(StateError, match="epoch 3 is not newer"):
            await admin.set_engines(3, [])
        await admin.set_engines(5, [EngineEntry("a", a.url, eligible=False), EngineEntry("b", b.url)])
        assert await workers(admin) == {b.url}
        await admin.gate(closed=True)
        assert not (await admin.engines()).gate_closed, "it has none"
        await admin.set_engines(6, [])
        assert await workers(admin) == set()
        await admin.close()
        await stranger.close()


@installed
async def test_a_router_that_runs_already_gets_the_fleet_and_gives_it_back(router: VllmRouterProcess) -> None:
    async with SimServer(SimConfig()) as stale:
        admin = VllmRouterAdmin(router.url)
        await admin.set_engines(0, [EngineEntry("stale", stale.url)])
        async with Fleet.launch("sim-model", engines=2, kind="vllm-router", url=router.url, **SIM) as fleet:
            assert fleet.url == router.url
            assert await workers(admin) == {engine.url for engine in await fleet.engines()}
            await check_serves(fleet, engines=2)
        assert await workers(admin) == set()
        async with Fleet.connect([stale.url], kind="vllm-router", url=router.url) as fleet:
            assert await workers(admin) == {stale.url}
        await admin.close()


async def workers(admin: VllmRouterAdmin) -> set[str]:
    return set(await admin._workers())


async def test_a_router_of_ours_that_runs_already_gets_the_fleet_too() -> None:
    router = Router()
    await router.start("127.0.0.1", 0)
    try:
        async with SimServer(SimConfig()) as engine:
            router.dispatcher.set_engines(0, [EngineEntry("x", engine.url)])
            with pytest.raises(EngineHTTPError) as error:
                await Fleet.launch("sim-model", kind="vllm-router", url=router.url, **SIM)
            assert error.value.status == 404, "it is no vllm-router"
        async with Fleet.launch("sim-model", url=router.url, **SIM) as fleet:
            assert fleet.url == router.url
            await check_serves(fleet, engines=1)
            with pytest.raises(StateError, match="is held already"):
                await Fleet.launch("sim-model", url=router.url, **SIM)
            await check_serves(fleet, engines=1)
    finally:
        await router.close()


async def test_what_is_not_there_is_said_before_an_engine_starts() -> None:
    with pytest.raises(EngineDeadError, match=r"vllm-router at http://127\.0\.0\.1:9"):
        await Fleet.launch("sim-model", kind="vllm-router", url="http://127.0.0.1:9", **SIM)
    with pytest.raises(ConfigError, match="url"):
        Fleet.launch("sim-model", kind="vllm-router", url="localhost:9", **SIM)
    async with SimServer(SimConfig()) as engine:
        with pytest.raises((UserError, EngineHTTPError)):
            await Fleet.connect([engine.url], kind="vllm-router", url=engine.url)


@installed
async def test_who_listens_on_its_port_is_not_taken_for_it(tmp_path: Path) -> None:
    async with SimServer(SimConfig()) as somebody:
        port = urlsplit(somebody.url).port
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            await VllmRouterProcess.launch(RouterConfig(kind="vllm-router", port=port), log_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing was started"


async def test_not_installed_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_router", None)
    with pytest.raises(UserError, match=r"vllm-router, which is not installed; pip install 'penstock\[bench\]'"):
        Fleet.launch("sim-model", kind="vllm-router", **SIM)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host": "0.0.0.0"}, "opens the router to other machines"),
        ({"kind": "envoy"}, "kind.*'penstock' or 'vllm-router'"),
        (
            {"policy": "kv-cache"},
            "router.policy 'kv-cache': with router.kind vllm-router it must be one of ",
        ),
        ({"policy": ["prefix-aware", "requests"]}, "router.policy 'prefix-aware,requests'"),
        ({"workers": 3}, "router.workers=3 would have no effect: vllm-router has nothing of the kind; leave it out"),
        ({"max_hold_s": 1.0}, "router.max_hold_s=1.0 would have no effect"),
        ({"url": "http://127.0.0.1:9", "policy": "random"}, "router.policy=random would .* runs already"),
        ({"kind": "penstock", "url": "http://127.0.0.1:9", "workers": 2}, "router.workers=2 would have no effect"),
    ],
)
def test_what_it_cannot_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        # A key does not help: its worker calls ask for none.
        Fleet.launch("sim-model", api_key="secret", **{"kind": "vllm-router", **SIM, **config})


@installed
@pytest.mark.parametrize("policy", sorted(POLICIES.values()))
def test_it_has_the_policies_that_ours_are_mapped_to(policy: str) -> None:
    import argparse

    from vllm_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    argv = command(RouterConfig(kind="vllm-router"), 1, 2)[3:]
    argv[argv.index("--policy") + 1] = policy
    assert parser.parse_args(argv).policy == policy


@installed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_when_its_launcher_ends_it_is_gone(number: signal.Signals, tmp_path: Path) -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, str(tmp_path), stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert launcher.stdout is not None
        assert await asyncio.wait_for(launcher.stdout.readline(), 60) == b"ready\n"
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) == 2
    finally:
        launcher.send_signal(number)
        await asyncio.wait_for(launcher.wait(), 60)
    _, left = await asyncio.to_thread(psutil.wait_procs, family, timeout=60.0)
    assert left == []


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from penstock.config import RouterConfig
from penstock.fleet.vllm_router import VllmRouterProcess

async def main():
    await VllmRouterProcess.launch(RouterConfig(kind="vllm-router"), log_dir=Path(sys.argv[1]))
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
