"""Servers that someone else started, beside launched ones: what they can do is done, and no more is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from patience import WAIT_S, asked
from penstock import Fleet
from penstock.control_types import PauseMode
from penstock.errors import ConfigError, EngineDeadError, MissingCapabilityError, UpdateError, UserError
from penstock.fleet import pausing, supervise
from penstock.fleet.member import State
from penstock.settings import ServerSpec
from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.server import SimServer
from sim_fleets import LONG, SIM, check, check_serves, in_flight, slowed, whole
from sim_verify import generate

PROMPTS = [[1 + i, 2] for i in range(16)]
GOOD = [("w", torch.ones(2))]
QUICK: dict[str, Any] = {"health_interval_s": 0.05, "restart_backoff_s": 0.05}


def server(**config: Any) -> SimServer:
    return SimServer(SimConfig(**{"tokens_per_second": 500, "max_model_len": 512, **config}))


@asynccontextmanager
async def plain_fleet(*servers: SimServer) -> AsyncIterator[Fleet]:
    async with Fleet.connect([one.url for one in servers], control_timeout_s=WAIT_S, **QUICK) as fleet:
        yield fleet


async def states(fleet: Fleet) -> dict[str, State]:
    return {status.name: status.state for status in await fleet.engines()}


async def until(fleet: Fleet, name: str, state: State) -> None:
    """Return when it is seen in `state`, which it must not leave by itself: a busy machine may look too late."""
    await asked(lambda: states(fleet), lambda seen: seen[name] is state)


async def test_servers_of_another_model_are_refused() -> None:
    async with server() as first, server(vocab_size=512) as other, server() as third:
        with pytest.raises(
            UserError, match=r"serves another model: its vocabulary has 512 tokens, that of engine e0 1"
        ):
            await Fleet.connect([first.url, other.url]).__aenter__()
        async with plain_fleet(first) as fleet:
            with pytest.raises(UserError, match=f"{other.url} serves another model: its vocabulary has 512 tokens"):
                await fleet.attach(other.url)
            await fleet.attach(third.url)
            await check_serves(fleet, engines=2)
            await fleet.remove("e0")
            with pytest.raises(UserError, match=r"that of engine e2 1024$"):
                await fleet.attach(other.url)


async def test_a_server_is_taken_once_by_whatever_address_and_another_name_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def elsewhere(url: str) -> str:
        return url.replace("127.0.0.1", "127.0.0.2")

    async with server(host="0.0.0.0") as first, server(plain=True, host="0.0.0.0", served_model_name="m") as plain:
        urls = [one.url.replace("0.0.0.0", "127.0.0.1") for one in (first, plain)]
        for url in urls:
            with pytest.raises(UserError, match=r"is the server of engine e\d, .* already as .*give each server once$"):
                await Fleet.connect([url, elsewhere(url)]).__aenter__()
        async with Fleet.connect(urls[:1], control_timeout_s=WAIT_S, **QUICK) as fleet:
            with pytest.raises(UserError, match=f"is the server of engine e0, .* already as {urls[0]}; "):
                await fleet.attach(elsewhere(urls[0]))
            assert "serves" not in caplog.text
            assert await fleet.attach(urls[1]) == ("e2",)
            assert "engine e2 serves 'm', and engine e0 serves 'sim-model': if these are two models" in caplog.text
            await check_serves(fleet, engines=2)
            await fleet.remove("e2")
            assert await fleet.attach(elsewhere(urls[1])) == ("e3",)


async def test_launched_and_attached_with_and_without_plugin_in_one_fleet() -> None:
    async with server(plain=True, data_parallel_size=2) as plain, server() as ours:
        attach = [f"{plain.url}/#dp=2", ServerSpec(url=ours.url)]
        async with Fleet.launch("any", engines=1, attach=attach, **SIM, **QUICK) as fleet:
            await check_serves(fleet, engines=3)
            out = await fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG)
            check(PROMPTS, out, LONG)
            assert all(rank.stats.generation_tokens for rank in (*plain.ranks, *ours.ranks))
            loads = (await fleet.router_admin.engines()).engines
            assert [(load.name, load.dp_rank) for load in loads] == [
                ("e0", None), ("e1.dp0", 0), ("e1.dp1", 1), ("e2", None)
            ]  # fmt: skip
            assert fleet.dp_size == 4
            await fleet.pause_generation()
            assert [rank.paused for rank in (*plain.ranks, *ours.ranks)] == [True] * 3
            await fleet.resume_generation()
            with pytest.raises(MissingCapabilityError, match="update_weights: engine e1 lacks Penstock's plugin"):
                await fleet.update_weights(GOOD)
            assert fleet.weight_version == 0
            await check_serves(fleet, engines=3)
            await fleet.remove("e1")
            assert (await fleet.update_weights(GOOD)).version == 1
            await check_serves(fleet, engines=2)
        assert plain.engine.weights.version == 0
        assert not plain.gone.is_set()
        assert len(await generate(plain.engine, [1], {"max_tokens": 2})) == 1, "it runs on"


async def test_a_call_that_one_engine_lacks_reaches_no_engine() -> None:
    async with server() as ours, server(plain=True, dev_mode=False) as bare, plain_fleet(ours, bare) as fleet:
        calls = {
            "pause_generation": fleet.pause_generation(),
            "abort": fleet.abort_generation(),
            "reset of the prefix cache": fleet.reset_prefix_cache(),
            "sleep": fleet.sleep(),
            "collective_rpc": fleet.collective_rpc("f"),
            "init_weight_update_communicator": fleet.init_weight_update_communicator({}),
            "update_weights": fleet.update_weights(GOOD),
        }
        for operation, call in calls.items():
            with pytest.raises(MissingCapabilityError, match=f"^{operation}: engine e1 lacks"):
                await call
        assert not ours.engine.paused
        assert not ours.engine.asleep
        assert set((await states(fleet)).values()) == {State.SERVING}
        out = await fleet.completion({"prompt": ["a", "b"], "max_tokens": 3})
        assert out["usage"]["completion_tokens"] == 6
        with pytest.raises(MissingCapabilityError, match="generate with logprobs: engine e1 lacks logprobs"):
            await fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG)


async def test_a_server_that_dies_is_out_and_in_again_with_the_fleets_weights() -> None:
    async with server() as lasting, server() as dying:
        port = int(dying.url.rpartition(":")[2])
        async with plain_fleet(lasting, dying) as fleet:
            await fleet.update_weights(GOOD)
            async with slowed(fleet):
                request = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG))
                await in_flight(fleet, lambda count: count > 0)
                await dying.stop()
            await whole(request, PROMPTS, LONG)
            await until(fleet, "e1", State.DEAD)
            await fleet.update_weights(GOOD)
            async with server(port=port) as back:
                await until(fleet, "e1", State.SERVING)
                assert back.engine.weights.version == 2, "its weights were brought to it"
                await check_serves(fleet, engines=2)


async def test_a_plain_one_comes_back_when_it_says_the_fleets_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RECHECK_S", 0.05)
    async with server(plain=True) as lasting, server(plain=True) as dying:
        port = int(dying.url.rpartition(":")[2])
        async with plain_fleet(lasting, dying) as fleet:
            await dying.stop()
            await until(fleet, "e1", State.DEAD)
            async with server(plain=True, port=port) as back:
                await until(fleet, "e1", State.SERVING)
                await fleet.init_weight_update_communicator({})
                await fleet.pause_generation()
                await fleet.update_named_weights({}, version=1)
                await fleet.resume_generation()
                await check_serves(fleet, engines=2)
                await back.stop()
                await until(fleet, "e1", State.DEAD)
            async with server(plain=True, port=port) as again:
                await until(fleet, "e1", State.SYNCING)
                await asyncio.sleep(0.3)
                assert (await states(fleet))["e1"] is State.SYNCING, "version 0 is not the fleet's"
                await check_serves(fleet, engines=1)
                again.engine.weights.label = "1"
                again.engine.weights.identity = 1
                await until(fleet, "e1", State.SERVING)
                await check_serves(fleet, engines=2)


@pytest.mark.parametrize("plain", [True, False])
async def test_weights_are_torn_though_a_health_check_was_the_first_to_find_the_engine_dead(
    monkeypatch: pytest.MonkeyPatch, *, plain: bool
) -> None:
    monkeypatch.setattr(supervise, "RECHECK_S", 0.05)
    timeouts = {"control_timeout_s": WAIT_S, "hang_timeout_s": 3.0}
    async with server(plain=plain) as only, Fleet.connect([only.url], **timeouts, **QUICK) as fleet:
        if plain:
            await fleet.init_weight_update_communicator({})
            await fleet.pause_generation()
        only.engine.faults.add(Fault(FaultKind.HANG, Phase.LOAD))
        only.engine.faults.add(Fault(FaultKind.HANG, Phase.HEALTH, times=1 << 30))
        called = fleet.update_named_weights({}, version=1) if plain else fleet.update_weights(GOOD)
        update = asyncio.create_task(called)
        await until(fleet, "e0", State.DEAD)
        assert (await fleet.engines())[0].reason.startswith("health check failed: no answer to a health check in")
        only.engine.faults._armed.clear()  # it is well again, and its part in the update still hangs
        await until(fleet, "e0", State.SYNCING)
        with pytest.raises(EngineDeadError if plain else UpdateError):
            await asyncio.wait_for(update, WAIT_S)
        assert only.engine.paused
        await until(fleet, "e0", State.SYNCING)
        await asyncio.sleep(0.3)
        (status,) = await fleet.engines()
        assert status.state is State.SYNCING, "half of its weights are of no version"
        assert fleet.weight_version == 0


async def test_a_server_that_was_paused_when_it_died_of_an_update_serves_again() -> None:
    async with server() as lasting, server() as failing, plain_fleet(lasting, failing) as fleet:
        await fleet.update_weights(GOOD)
        failing.engine.faults.add(Fault(FaultKind.REFUSE, Phase.LOAD))
        report = await fleet.update_weights(GOOD)
        assert list(report.failures) == ["e1"]
        await until(fleet, "e1", State.SERVING)
        assert not failing.engine.paused
        await check_serves(fleet, engines=2)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_server_that_was_out_while_the_others_woke_up_is_woken_before_it_serves(level: int) -> None:
    async with server() as lasting, server() as failing, plain_fleet(lasting, failing) as fleet:
        await fleet.update_weights(GOOD)
        await fleet.sleep(level)
        failing.engine.faults.add(Fault(FaultKind.REFUSE, Phase.HEALTH, times=1 << 30))
        await until(fleet, "e1", State.DEAD)
        await fleet.wake_up()
        if level == pausing.DROPS_WEIGHTS:
            await fleet.update_weights(GOOD)
        failing.engine.faults.clear()
        await until(fleet, "e1", State.SERVING)
        assert not failing.engine.asleep
        assert not failing.engine.paused
        await check_serves(fleet, engines=2)


async def test_a_server_that_comes_back_to_a_fleet_that_sleeps_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server() as lasting, server() as failing, plain_fleet(lasting, failing) as fleet:
        await fleet.update_weights(GOOD)
        await fleet.sleep()
        woken: list[object] = []
        wake_up = failing.engine.wake_up

        async def noted(tags: Sequence[str] | None = None) -> bool:
            woken.append(tags)
            return await wake_up(tags)

        monkeypatch.setattr(failing.engine, "wake_up", noted)
        failing.engine.faults.add(Fault(FaultKind.REFUSE, Phase.HEALTH, times=1 << 30))
        await until(fleet, "e1", State.DEAD)
        failing.engine.faults.clear()
        await until(fleet, "e1", State.SERVING)
        assert not woken, "the trainer may use that memory"
        await fleet.wake_up()
        assert woken
        await check_serves(fleet, engines=2)


@pytest.mark.parametrize("plain", [True, False])
async def test_a_server_that_its_owner_has_paused_serves_when_it_is_attached(*, plain: bool) -> None:
    async with server() as first, server(plain=plain) as second, plain_fleet(first) as fleet:
        await second.engine.pause(PauseMode.ABORT)
        assert await fleet.attach(second.url) == ("e1",)
        assert not second.engine.paused
        await check_serves(fleet, engines=2)
        await fleet.remove("e1")
        await fleet.pause_generation()
        assert await fleet.attach(second.url) == ("e2",)
        assert second.engine.paused, "as the fleet is"
        await fleet.resume_generation()
        await check_serves(fleet, engines=2)


async def test_requests_that_wait_while_the_first_plain_server_joins_are_answered_by_it_too() -> None:
    async with server() as first, server(plain=True) as second, plain_fleet(first) as fleet:
        await fleet.pause_generation()
        batch = asyncio.create_task(fleet.generate(prompt_token_ids=PROMPTS, sampling_params=LONG))
        stream = asyncio.create_task(anext(fleet.completion_stream({"prompt": "a", "max_tokens": 3})))
        await asyncio.sleep(0.1)
        await fleet.attach(second.url)
        await fleet.resume_generation()
        await whole(batch, PROMPTS, LONG)
        assert (await stream)["choices"]
        assert second.engine.stats.generation_tokens > 0


async def test_servers_are_attached_to_a_fleet_that_serves() -> None:
    async with server(data_parallel_size=2) as first, server(plain=True) as second, server() as third:
        async with plain_fleet(first) as fleet:
            await fleet.update_weights(GOOD)
            assert await fleet.attach(third.url) == ("e1",)
            assert third.engine.weights.version == 1
            assert await fleet.attach(second.url) == ("e2",)
            assert (await states(fleet))["e2"] is State.SYNCING, "it waits for version 1"
            await check_serves(fleet, engines=2)
            with pytest.raises(UserError, match="belongs to this fleet already; remove it first"):
                await fleet.attach(third.url)
            await fleet.remove("e1")
            assert await fleet.attach(f"{third.url}#dp=1") == ("e3",)
            async with Fleet.connect(fleet.url) as adopted:
                await adopted.remove("e3")
                assert await adopted.attach(ServerSpec(url=third.url)) == ("e4",)
            await check_serves(fleet, engines=2)
        async with Fleet.connect([first.url, third.url]) as again:
            assert again.weight_version == 1, "nobody has ended them"


async def test_a_server_that_two_calls_attach_at_once_joins_once() -> None:
    """Without dev mode it names no instance by which it is known again."""
    async with server() as first, server(plain=True, dev_mode=False) as bare, plain_fleet(first) as fleet:
        joined, refused = sorted(
            await asyncio.gather(fleet.attach(bare.url), fleet.attach(bare.url), return_exceptions=True),
            key=lambda answer: isinstance(answer, UserError),
        )
        assert not isinstance(joined, BaseException)
        assert isinstance(refused, UserError)
        await fleet.remove("e1")


async def test_servers_that_cannot_be_attached_are_refused() -> None:
    async with server(data_parallel_size=2) as two:
        with pytest.raises(UserError, match="has 2 data-parallel ranks, not dp=3"):
            await Fleet.connect([f"{two.url}#dp=3"])
        with pytest.raises(UserError, match=f"{two.url} is named twice"):
            Fleet.launch("any", attach=[two.url, two.url + "#dp=1"], **SIM)
        with pytest.raises(UserError, match="is named twice"):
            Fleet.connect([two.url, two.url.replace("127.0.0.1", "localhost")])
        async with plain_fleet(two) as fleet:
            with pytest.raises(UserError, match="is a router of Penstock, not an engine"):
                await fleet.attach(fleet.url)
            with pytest.raises(UserError, match=r"the server http://localhost:\d+ belongs to this fleet already"):
                await fleet.attach(two.url.replace("127.0.0.1", "localhost"))
            with pytest.raises(EngineDeadError):
                await fleet.attach("http://127.0.0.1:9")
            with pytest.raises(ConfigError, match=r"several are given one by one, got \['http://h:1'\]"):
                await fleet.attach(["http://h:1"])
            with pytest.raises(
                ConfigError,
                match=r"^config key 'url': a server's address is http://HOST:PORT, got 'http://\*\*\*@h:9'$",
            ):
                await fleet.attach("http://user:p@ss/word@h:9")
            for other in ("h:1", "http://127.0.0.1", "http://127.0.0.1:9/v1", "http://127.0.0.1:9?a"):
                with pytest.raises(
                    ConfigError, match=r"^config key 'url': a server's address is http://HOST:PORT, got "
                ):
                    await fleet.attach(other)
            await check_serves(fleet, engines=1)
    with pytest.raises(ConfigError, match=r"a server is its URL or a ServerSpec; .* got None"):
        Fleet.connect(None)  # pyright: ignore[reportArgumentType] - a variable that is not set
    with pytest.raises(ConfigError, match=r"a server's address is .* got 'http://h:1#rank=2'"):
        Fleet.launch("any", attach=["http://h:1#rank=2"], **SIM)
    with pytest.raises(ConfigError, match="vllm-router addresses no data-parallel ranks"):
        Fleet.launch("any", attach=["http://h:1#dp=2"], kind="vllm-router", url="http://127.0.0.1:9", **SIM)


async def test_a_fleet_of_attached_servers_alone_can_grow() -> None:
    async with server(plain=True) as one, Fleet.launch("any", engines=0, attach=[one.url], **SIM) as fleet:
        await check_serves(fleet, engines=1)
        assert await fleet.add_engines(1) == ("e1",)
        await check_serves(fleet, engines=2)


async def test_a_server_without_processed_logprobs_is_refused_where_they_are_asked_for() -> None:
    async with (
        server(logprobs_mode="raw_logprobs") as raw,
        Fleet.launch("any", engines=1, attach=[raw.url], **SIM, **QUICK) as fleet,
    ):
        async with Fleet.connect(fleet.url) as adopted:
            for one in (fleet, adopted):
                with pytest.raises(MissingCapabilityError, match=r"e1 lacks logprobs .* --logprobs-mode processed"):
                    await one.sample([1, 2], 2, LONG)
                samples = await one.sample([1, 2], 2, replace(LONG, logprobs=False))
                assert [len(sample.token_ids) for sample in samples] == [LONG.max_tokens] * 2
        await fleet.remove("e1")
        await check_serves(fleet, engines=1)
