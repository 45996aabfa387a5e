"""Load balancers of the facade: what they choose is what the router does."""

from __future__ import annotations

import psutil
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from patience import WAIT_S, eventually
from penstock import AsyncVLLM
from penstock.errors import RequestError, StateError, UserError
from penstock.facade.vllm_like import LoadBalancer
from penstock.fleet import router_process
from sim_fleets import router_process as router_process_at

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SIM = {"profile": "sim", "max_model_len": 2048, "extra_args": {"tokens-per-second": 500}}


@pytest.fixture(scope="module")
def service():
    with AsyncVLLM.from_pretrained("any-name", num_replicas=3, health_interval_s=0.1, **SIM) as service:
        yield service


def counts(service):
    """Requests that each engine got since it joined."""
    loads = {load.name: load.requests for load in service.ask_router(lambda admin: admin.engines()).engines}
    return [loads[name] for name in service.engine_names()]


def sent(service, prompts):
    """How many of these went to which engine."""
    before = counts(service)
    service.generate(prompts, PARAMS)
    return [b - a for a, b in zip(before, counts(service), strict=True)]


def test_a_shared_beginning_goes_where_it_is_and_spills_over_when_that_is_full(service):
    service.create_load_balancer(["prefix-aware", "requests"], prefix_length=64, overload_threshold=1.5)
    system = list(range(5, 205))
    alone = [sent(service, [[*system, 300 + i]]) for i in range(6)]
    assert len({tuple(each) for each in alone}) == 1, "each finds the engine that has the system prompt"
    together = sent(service, [[*system, 400 + i] for i in range(90)])
    assert max(together) <= 0.6 * 90, "and one that is overloaded is passed over"


def test_a_choice_is_what_the_router_does(service):
    balancer = service.create_load_balancer(["prefix-aware", "requests"], prefix_length=64)
    prompts = [[7 + i] * 150 for i in range(6)]
    for prompt in prompts:
        service.generate([prompt], PARAMS)
    for prompt in prompts:
        chosen = balancer.select_actor(prompt=[*prompt, 9])
        assert balancer.select_actor(prompt=[*prompt, 9]) == chosen
        got = sent(service, [[*prompt, 9]])
        assert got[chosen] == 1
    balancer = service.create_load_balancer("round-robin")
    chosen = [balancer.select_actor() for _ in range(6)]
    assert sorted(chosen[:3]) == [0, 1, 2]
    assert chosen[3:] == chosen[:3], "each choice counts"
    assert balancer.select_actor("text, which no tokenizer is here for") in range(3)


def test_statistics_are_the_routers_and_the_engines_own(service):
    strategies = ["prefix-aware", "kv-cache", "round-robin"]
    balancer = LoadBalancer(service, strategies, prefix_length=16, overload_threshold=2)
    service.generate([[5, 6]] * 9, PARAMS)
    stats = balancer.get_stats()
    assert stats["strategies"] == strategies
    assert stats["primary_strategy"] == "prefix-aware"
    assert (stats["prefix_length"], stats["overload_threshold"], stats["num_actors"]) == (16, 2.0, 3)
    assert stats["placements"]["kv-cache"] + stats["placements"]["round-robin"] >= 9
    assert stats["actor_stats"] == [
        {"actor_index": i, "pending_requests": 0, "cache_usage": usage}
        for i, usage in enumerate(service.get_cache_usage())
    ]


def test_wrong_balancers_leave_the_old_one(service):
    service.create_load_balancer("requests", prefix_length=100)
    with pytest.raises(UserError, match="fastest"):
        service.create_load_balancer("fastest")
    with pytest.raises(UserError, match="prefix_length"):
        service.create_load_balancer("requests", prefix_length=0)
    with pytest.raises(RequestError, match="AsyncVLLM"):
        LoadBalancer(["actor"])
    assert service.ask_router(lambda admin: admin.engines()).policy["policy"] == "requests"


def test_nowhere_to_go_is_said(service):
    balancer = service.create_load_balancer()
    service.call(service.fleet.pause_generation())
    with pytest.raises(StateError, match="would have to wait"):
        balancer.select_actor()
    service.call(service.fleet.resume_generation())
    assert balancer.select_actor() in range(3)


def test_a_router_that_is_started_anew_keeps_it(service, monkeypatch):
    told, check = [], router_process.keep_in_step

    async def noted(roster):
        await check(roster)
        told.append((await roster.admin.engines()).policy.get("prefix_length"))

    monkeypatch.setattr(router_process, "keep_in_step", noted)  # what the fleet asks every tenth of a second
    service.create_load_balancer("round-robin", prefix_length=77)
    service.call(eventually(lambda: told.count(77) >= 2))  # at the second time the first has been kept
    router = router_process_at(service.fleet.url)
    router.kill()
    assert sum(sent_after_restart(service, router)) == 9
    state = service.ask_router(lambda admin: admin.engines())
    assert state.policy["policy"] == "round-robin"
    assert state.policy["prefix_length"] == 77
    assert state.placements == {"round-robin": 9}


def sent_after_restart(service, router):
    psutil.wait_procs([router], timeout=WAIT_S)
    service.generate([[5, i] for i in range(9)], PARAMS, timeout_seconds=WAIT_S)
    return counts(service)


def test_a_rank_that_is_chosen_is_its_engines():
    """The router places on data-parallel ranks, which are no engines of their own here."""
    ranks = {**SIM, "extra_args": {"data-parallel-size": 2}}
    with AsyncVLLM.from_pretrained("any-name", num_replicas=2, **ranks) as service:
        balancer = service.create_load_balancer("round-robin")
        assert balancer.select_actor() in range(2)
        service.generate([[5, 6]], PARAMS)
        assert balancer.select_actor([5, 6]) in range(2)
