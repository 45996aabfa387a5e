"""A vllm-router in the place of ours, over simulated engines: what a fleet does goes on, and what it lacks is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import WAIT_S, asked
from penstock import Fleet, SamplingParams
from penstock.errors import ConfigError, EngineHTTPError, StateError
from penstock.fleet.member import State
from penstock.fleet.running_router import VllmRouterAdmin
from penstock.router.membership import EngineEntry, Membership
from penstock.sim import SimConfig, SimServer
from sim_fleets import SIM, begun, check, check_serves, engine_process, router_here, slowed, whole
from vllm_router_server import installed, vllm_router

PROMPTS = [[1 + i, 2, 3] for i in range(24)]
LONG = SamplingParams(max_tokens=400, detokenize=False)
SHORT = SamplingParams(max_tokens=5, detokenize=False)


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with (
        vllm_router(tmp_path_factory.mktemp("router") / "log") as url,
        Fleet.launch("sim-model", engines=3, kind="vllm-router", url=url, **SIM) as fleet,
    ):
        yield fleet


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[str]:
    async with vllm_router(tmp_path / "log") as url:
        yield url


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
async def test_an_engine_that_dies_leaves_its_workers_costs_no_request_and_is_one_again(router: str) -> None:
    options = {"kind": "vllm-router", "url": router, "restart_backoff_s": 0.05}
    async with Fleet.launch("sim-model", engines=3, **options, **SIM) as fleet:
        await fleet.update_weights(weights())
        admin = VllmRouterAdmin(fleet.url)
        victim, *rest = await fleet.engines()
        assert await workers(admin) == {engine.url for engine in (victim, *rest)}
        async with slowed(fleet):
            running = await begun(fleet, PROMPTS, LONG)
            await fleet.update_weights(weights())  # in flight, and no gate holds others
            engine_process(victim.url).kill()
        await until_workers(admin, {engine.url for engine in rest})
        await whole(running, PROMPTS, LONG)
        for i in range(12):  # wherever its sessions were
            await fleet.sample([8, 8], 1, SHORT, session_id=i)
        member = fleet._roster.members[0]
        assert await fleet._roster.until(lambda: member.state is State.SERVING, deadline_s=WAIT_S)
        await until_workers(admin, {engine.url for engine in await fleet.engines()})
        assert [update.engine for update in (await fleet.update_weights(weights())).engines] == ["e0", "e1", "e2"]
        await check_serves(fleet, engines=3)
        await admin.close()


async def until_workers(admin: VllmRouterAdmin, urls: set[str]) -> None:
    await asked(lambda: workers(admin), lambda now: now == urls)


@installed
async def test_engines_ask_for_the_key_and_the_router_has_none(router: str) -> None:
    options = {"kind": "vllm-router", "url": router, "api_key": "secret"}
    async with Fleet.launch("sim-model", engines=1, **options, **SIM) as fleet:
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
                await stranger.call("POST", path, body, timeout_s=WAIT_S)
            assert error.value.status == 401, path
        await stranger.close()
        assert engine.state is State.SERVING


@installed
async def test_full_sets_become_workers_added_and_removed(router: str) -> None:
    async with SimServer(SimConfig()) as a, SimServer(SimConfig()) as b:
        admin, stranger = VllmRouterAdmin(router), VllmRouterAdmin(router)
        await stranger.announce(Membership(0, (EngineEntry("x", b.url),)))
        first = (EngineEntry("a", a.url, 3),)
        await admin.announce(Membership(4, first))
        assert await workers(admin) == {a.url}, "the set is a full one"
        state = await admin.engines()
        assert (state.epoch, [(e.name, e.weight_version, e.eligible, e.down) for e in state.engines]) == (
            4, [("a", 3, True, False)]
        )  # fmt: skip
        await admin.announce(Membership(4, first))
        with pytest.raises(StateError, match="epoch 3 is not newer"):
            await admin.announce(Membership(3, ()))
        other = (EngineEntry("a", a.url, eligible=False), EngineEntry("b", b.url))
        await admin.announce(Membership(5, other, closed=True))
        assert await workers(admin) == {b.url}
        assert not (await admin.engines()).gate_closed, "it has none"
        await admin.announce(Membership(6, ()))
        assert await workers(admin) == set()
        await admin.close()
        await stranger.close()


@installed
async def test_a_router_that_runs_already_gets_the_fleet_and_gives_it_back(router: str) -> None:
    async with SimServer(SimConfig()) as stale:
        admin = VllmRouterAdmin(router)
        await admin.announce(Membership(0, (EngineEntry("stale", stale.url),)))
        async with Fleet.launch("sim-model", engines=2, kind="vllm-router", url=router, **SIM) as fleet:
            assert fleet.url == router
            assert await workers(admin) == {engine.url for engine in await fleet.engines()}
            await check_serves(fleet, engines=2)
        assert await workers(admin) == set()
        async with Fleet.connect([stale.url], kind="vllm-router", url=router) as fleet:
            assert await workers(admin) == {stale.url}
        await admin.close()


async def workers(admin: VllmRouterAdmin) -> set[str]:
    return set(await admin._workers())


async def test_a_router_of_ours_that_runs_already_gets_the_fleet_too() -> None:
    async with router_here() as router:
        async with SimServer(SimConfig()) as engine:
            router.dispatcher.set_membership(Membership(0, (EngineEntry("x", engine.url),)))
            with pytest.raises(EngineHTTPError) as error:
                await Fleet.launch("sim-model", kind="vllm-router", url=router.url, **SIM)
            assert error.value.status == 404, "it is no vllm-router"
        async with Fleet.launch("sim-model", url=router.url, **SIM) as fleet:
            assert fleet.url == router.url
            await check_serves(fleet, engines=1)
            with pytest.raises(StateError, match="owns the fleet behind"):
                await Fleet.launch("sim-model", url=router.url, **SIM)
            await check_serves(fleet, engines=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "vllm-router"}, "router.kind=vllm-router needs router.url: a fleet starts no vllm-router"),
        ({"kind": "envoy"}, "kind.*'penstock' or 'vllm-router'"),
        ({"url": "http://127.0.0.1:9", "policy": "requests"}, "router.policy=requests would .* runs already"),
        ({"kind": "penstock", "url": "http://127.0.0.1:9", "workers": 2}, "router.workers=2 would have no effect"),
    ],
)
def test_options_that_a_router_cannot_follow_start_nothing(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fleet.launch("sim-model", api_key="secret", **{"kind": "vllm-router", **SIM, **config})
