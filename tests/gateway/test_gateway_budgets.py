"""Budgets of sessions with several turns at once, and the sampling of a session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway_rig import Rig, auth
from patience import WAIT_S
from penstock.gateway.graph import Limits, Session
from penstock.gateway.messages import ChatMessage, ChatRequest
from penstock.rollout.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def at_once(rig: Rig, count: int, **more: Any) -> list[Any]:
    """Ask so many turns; they end once all of them wait at the engine, or cannot."""
    rig.engine.hold = asyncio.Event()
    asking = [asyncio.create_task(rig.http.post(CHAT, json=body(str(i), **more))) for i in range(count)]
    await rig.engine.asked.wait()
    await asyncio.sleep(0.2)
    rig.engine.hold.set()
    return await asyncio.gather(*asking)


async def test_turns_at_once_do_not_pass_the_limit_of_turns(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(max_turns=2))
    answers = await at_once(rig, 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 400, 400, 400]
    assert len(rig.session().nodes) == 2


async def test_a_turn_that_just_ended_counts_once_and_is_not_under_way(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its node and the callback of its task it counted twice: the second of two turns was refused."""
    rig, add = Rig(tokenizer, limits=Limits(max_turns=2)), Session.add
    ended: list[Any] = []

    def just_ended(session: Session) -> None:
        request = ChatRequest((ChatMessage("user", "next"),))
        ended.append(rig.gateway.submit(session, request, b"next", is_retry=False).task)
        ended.append(rig.session())

    def add_and_go_on(session: Session, *node: Any) -> None:
        add(session, *node)
        if len(session.nodes) == 1:
            asyncio.get_running_loop().call_soon(just_ended, session)  # before the callbacks of the task that ends now
        else:
            asyncio.get_running_loop().call_soon(lambda: ended.append(rig.gateway.finish(rig.tenant, "default")))

    monkeypatch.setattr(Session, "add", add_and_go_on)
    await rig.post(CHAT, body("first"))
    await ended[0]
    await asyncio.sleep(0)
    assert len(ended[1].nodes) == 2
    assert ended[2] is ended[1]


async def test_a_turn_that_reserves_the_rest_lets_the_next_one_wait(tokenizer: Tokenizer) -> None:
    """Without `max_tokens` it reserves all; the turns beside it were refused although it sampled five tokens."""
    rig = Rig(tokenizer, limits=Limits(max_tokens=12))
    answers = await at_once(rig, 4)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 400]
    assert [params.max_tokens for params in rig.engine.params] == [12, 7, 2]
    assert rig.session().sampled_tokens == 12
    (refused,) = (answer for answer in answers if answer.status_code == 400)
    assert refused.json()["error"]["code"] == "budget_exceeded"


async def test_turns_that_fit_the_budget_together_run_at_once(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(max_tokens=21))
    rig.engine.texts = ["1234567890"] * 4
    rig.engine.hold = asyncio.Event()
    asking = [asyncio.create_task(rig.http.post(CHAT, json=body(str(i), max_tokens=10))) for i in range(3)]
    async with asyncio.timeout(WAIT_S):
        while len(rig.engine.params) < 2:  # noqa: ASYNC110 - each of them sends no event
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert [params.max_tokens for params in rig.engine.params] == [10, 10]
    rig.engine.hold.set()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3
    assert rig.engine.params[2].max_tokens == 1
    assert rig.session().sampled_tokens == 21


async def test_the_rest_of_a_budget_may_be_less_than_a_harness_s_least_tokens(tokenizer: Tokenizer) -> None:
    """The turn was refused, and its reservation stayed, so that the next one waited for ever."""
    rig = Rig(tokenizer, limits=Limits(max_tokens=7))
    async with asyncio.timeout(WAIT_S):
        for text in ("x", "y"):
            answer = await rig.http.post(CHAT, json=body(text, max_tokens=6, min_tokens=6))
            assert answer.status_code == 200, answer.text
    assert [(params.min_tokens, params.max_tokens) for params in rig.engine.params] == [(6, 6), (2, 2)]


async def test_seconds_end_a_session_and_its_turn_under_way(rig: Rig) -> None:
    opened = await rig.post("/sessions", {"max_seconds": 1.5})
    rig.engine.hold = asyncio.Event()
    for text in ("x", "y"):
        async with asyncio.timeout(WAIT_S):
            answer = await rig.http.post(CHAT, json=body(text), headers=auth(opened["api_key"]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "budget_exceeded")
        assert "max_seconds=1.5" in answer.text
    assert len(rig.engine.seen) == 1
    rig.engine.hold.set()
    assert (await rig.post(CHAT, body("x")))["choices"]  # a session without the limit


@pytest.mark.parametrize(("session", "used"), [({"temperature": 0.25}, 0.25), ({}, 0.5)])
async def test_a_session_s_sampling_goes_before_the_gateway_s_and_the_harness_s(
    tokenizer: Tokenizer, session: dict[str, Any], used: float
) -> None:
    rig = Rig(tokenizer, sampling={"temperature": 0.5})
    key = rig.gateway.open_session(rig.tenant, None, None, session).key
    await rig.post(CHAT, body("x", temperature=0.75), **auth(key))
    assert rig.engine.params[0].temperature == used
