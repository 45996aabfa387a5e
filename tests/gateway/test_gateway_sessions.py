"""Lineage, branches, retries, rewards, budgets and tenants of the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from wire_clients import WIRES, Chat

from gateway_rig import CALL, KEY, OTHER_KEY, PARAMETERS, THOUGHT, Engine, Rig, auth
from penstock.errors import ConfigError
from penstock.gateway import app
from penstock.gateway.graph import Limits
from penstock.gateway.messages import ToolCall
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"


def body(*texts: str, system: str = "", **more: Any) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *messages], **more}


async def causes(rig: Rig) -> dict[str, int]:
    answer = await rig.http.get("/sessions")
    report = answer.json()
    assert report["trained_tokens"] == report["sampled_tokens"]
    return report["breaks"]


# --- branches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
async def test_edited_arguments_branch_and_the_shared_turn_trains_once(rig: Rig, wire: type[Chat]) -> None:
    rig.engine.texts = ["first", CALL, "edited", "as it was", "more"]
    client = wire(rig)
    client.user("x")
    client.echo(await client.ask())
    client.user("call")
    answer = await client.ask()
    before = list(client.items)
    client.echo(json.loads(json.dumps(answer).replace('1,\\"b\\"', '7,\\"b\\"').replace('"a": 1,', '"a": 7,')))
    client.echo(await client.ask())
    client.user("on it goes")
    await client.ask()  # the edited call is still there, and this turn extends the one before
    client.items = before
    client.echo(answer)
    await client.ask()
    rows = await rig.rows()
    assert sorted(len(row["nodes"]) for row in rows) == [3, 3]
    assert sum(row["nodes"][0]["trained"] for row in rows) == 1
    assert await causes(rig) == {"edited arguments": 1}


@pytest.mark.parametrize("wire", WIRES)
async def test_edited_reasoning_is_a_branch(rig: Rig, wire: type[Chat]) -> None:
    rig.engine.texts = [f"{THOUGHT}five", "six", "seven"]
    client = wire(rig)
    client.user("x")
    answer = await client.ask()
    client.echo(json.loads(json.dumps(answer).replace("let me see", "no idea")))
    client.user("y")
    client.echo(await client.ask())
    client.user("z")
    await client.ask()  # continues the branch
    rows = await rig.rows()
    assert sorted(len(row["nodes"]) for row in rows) == [1, 2]
    assert await causes(rig) == {"edited reasoning": 1}


async def test_a_later_turn_continues_the_sibling_whose_ids_it_carries(rig: Rig) -> None:
    rig.engine.texts = ["same", "same", "same again", "same again", "end"]
    asked = [{"role": "user", "content": "x"}]
    first = await rig.post("/v1/responses", {"input": asked})
    second = await rig.post("/v1/responses", {"input": asked})
    both = [[*asked, *given["output"], {"role": "user", "content": "y"}] for given in (first, second)]
    for items in both:
        items.extend((await rig.post("/v1/responses", {"input": items}))["output"])
    stripped = {**both[0][-1], "id": None}  # only the first answer's id is left
    await rig.post("/v1/responses", {"input": [*both[0][:-1], stripped, {"role": "user", "content": "z"}]})
    *_, last = rig.session().nodes.values()
    assert last.path()[0].id in first["id"]


def test_equal_numbers_are_no_edit() -> None:
    assert ToolCall("a", "f", '{"x": 1.0}').meaning == ToolCall("a", "f", '{"x": 1}').meaning
    assert ToolCall("a", "f", '{"x": 1.5}').meaning != ToolCall("a", "f", '{"x": 1}').meaning


async def test_each_kind_of_break_is_counted_by_its_cause(rig: Rig) -> None:
    rig.engine.texts = ["one", "two"]
    await rig.post(CHAT, body("a", system="s"))
    await rig.post(CHAT, body("a", "one", "b", system="s"))
    await rig.post(CHAT, body("a", "uno", "b", system="s"))
    await rig.post(CHAT, body("b", "two", "c", system="s"))  # a dropped turn
    await rig.post(CHAT, body("sub-agent", system="another"))
    await rig.post(CHAT, body("summary of it all", system="s"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    await rig.post(CHAT, body("a", "one", "b", system="s", tools=[tool]))
    rows = await rig.rows()
    assert [len(row["nodes"]) for row in rows] == [2, 1, 1, 1, 1, 1]
    assert await causes(rig) == {
        "edited history": 2, "other system prompt": 1, "new conversation": 1, "other tools": 1,
    }  # fmt: skip


async def test_an_edit_late_in_a_conversation_keeps_the_turns_before_it(rig: Rig) -> None:
    rig.engine.texts = ["one", "two", "three"]
    await rig.post(CHAT, body("a"))
    await rig.post(CHAT, body("a", "one", "b"))
    await rig.post(CHAT, body("a", "one", "b", "zwei", "c"))
    rows = await rig.rows()
    assert [len(row["nodes"]) for row in rows] == [2, 2]
    assert rows[0]["nodes"][0]["id"] == rows[1]["nodes"][0]["id"]
    assert "zwei" in rig.tokenizer.decode(rows[1]["response_ids"])
    assert await causes(rig) == {"edited history": 1}


async def test_a_row_shows_reasoning_and_calls(rig: Rig) -> None:
    """A turn without text was an empty text."""
    rig.engine.texts = [THOUGHT + CALL]
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    await rig.post(CHAT, body("x", tools=[tool]))
    ((node,),) = [row["nodes"] for row in await rig.rows()]
    assert (node["text"], node["reasoning"]) == ("", "let me see")
    assert [(call["name"], json.loads(call["arguments"])) for call in node["calls"]] == [("add", {"a": 1, "b": [2, 3]})]


async def test_an_id_outside_the_tokenizer_is_warned_of_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway's tokenizer was another model's, and texts were short in silence."""
    rig = Rig(tokenizer)
    last = max(tokenizer.huggingface.get_vocab().values())
    rig.engine.ids = [[last], [last + 1], [last + 2]]
    for text in "abc":
        await rig.post(CHAT, body(text))
    warned = [record.message for record in caplog.records if "an engine sampled id" in record.message]
    assert len(warned) == 1
    assert f"sampled id {last + 1}, and the tokenizer's last is {last}" in warned[0]


async def test_the_faithful_policy_renders_as_the_template_does(tokenizer: Tokenizer) -> None:
    """Thinking of turns before the last question is stripped there, so a question makes a branch; a result does not."""
    rig = Rig(tokenizer, policy="faithful")
    rig.engine.texts = [f"{THOUGHT}so\n{CALL}", "five", "bye"]
    client = Chat(rig)
    client.user("x")
    client.echo(await client.ask())
    client.echo(await client.ask())
    client.user("y")
    await client.ask()
    template = ChatTemplate(tokenizer)
    tools = [{"type": "function", "function": client.function}]
    messages = json.loads(json.dumps(client.items))
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert rig.engine.seen[-1] == template.render(messages, tools)
    assert tokenizer.decode(rig.engine.seen[-1]).count("let me see") == 0
    await rig.rows()
    assert await causes(rig) == {"template": 2}


async def test_a_faithful_prompt_continues_the_latest_turn_whose_tokens_it_begins_with(tokenizer: Tokenizer) -> None:
    """The turn before is none: its thinking is stripped. The one before that is."""
    rig = Rig(tokenizer, policy="faithful")
    rig.engine.texts = ["one", f"{THOUGHT}two", "three"]
    client = Chat(rig)
    for text in "xyz":
        client.user(text)
        client.echo(await client.ask())
    first, _, third = rig.session().nodes.values()
    assert (third.parent, third.cause) == (first, "template")
    assert [len(row["nodes"]) for row in await rig.rows()] == [2, 2]


async def test_reasoning_that_the_turn_before_left_open_goes_on(tmp_path: Any) -> None:
    from chat_model import chat_tokenizer

    rig = Rig(chat_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    rig.engine.texts = ["a<think>", "hm</think>yes"]
    await rig.post(CHAT, body("x", max_tokens=2))
    answer = await rig.post(CHAT, body("x", "a<think>", "\n"))
    message = answer["choices"][0]["message"]
    assert len(await rig.rows()) == 1
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm")


def test_a_template_that_cannot_be_extended_makes_the_gateway_faithful(tmp_path: Any) -> None:
    from chat_model import TEMPLATE, chat_tokenizer

    counting = chat_tokenizer(tmp_path, TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{{ messages | length }}"))
    gateway = Gateway(Engine(counting), ChatTemplate(counting), GatewayOptions("m", 99), [Tenant("a", "k")])
    assert gateway.policy == "faithful"
    assert gateway.codec.template_faults


# --- retries and streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "1"}, {"X-Stainless-Retry-Count": "1"}])
async def test_a_retry_reads_the_first_answer(rig: Rig, headers: dict[str, str]) -> None:
    first = await rig.post(CHAT, body("a"), **({"Idempotency-Key": "1"} if "Idempotency-Key" in headers else {}))
    again = await rig.post(CHAT, body("a"), **headers)
    assert again == first
    assert len(rig.engine.seen) == 1
    other = await rig.post(CHAT, body("a"))  # no retry: another sample
    assert other["id"] != first["id"]
    assert len(await rig.rows()) == 2


async def test_retries_while_the_turn_is_under_way_join_it(rig: Rig) -> None:
    rig.engine.hold = asyncio.Event()
    asking = [asyncio.create_task(rig.post(CHAT, body("a"), **{"Idempotency-Key": "1"})) for _ in range(5)]
    await asyncio.sleep(0.1)
    rig.engine.hold.set()
    assert len({json.dumps(answer) for answer in await asyncio.gather(*asking)}) == 1
    assert len(rig.engine.seen) == 1


# --- rewards ---------------------------------------------------------------------------------------------------------


async def test_rewards_of_session_leaf_and_turn_also_after_the_fact(rig: Rig) -> None:
    rig.engine.texts = ["one", "two", "other"]
    first = await rig.post(CHAT, body("a"))
    second = await rig.post(CHAT, body("a", "one", "b"))
    await rig.post(CHAT, body("elsewhere"))
    assert [row["reward"] for row in await rig.rows()] == [None, None]
    assert (await rig.http.get("/sessions")).json()["unscored_rows"] == 2
    await rig.post("/sessions/default/reward", {"reward": 1.0})
    assert [row["reward"] for row in await rig.rows()] == [1.0, 1.0]
    await rig.post("/sessions/default/reward", {"reward": 0.25, "node": first["id"]})
    rows = await rig.rows()
    assert [row["reward"] for row in rows] == [1.25, 1.0]
    assert [node["reward"] for node in rows[0]["nodes"]] == [0.25, None]
    await rig.post("/sessions/default/reward", {"reward": -1, "node": second["id"]})  # a leaf's own, for the session's
    await rig.post("/sessions/default/reward", {"reward": -1, "node": second["id"]})  # again: it is set, not added
    assert [row["reward"] for row in await rig.rows()] == [-0.75, 1.0]
    for wrong in ({"reward": "1"}, {"reward": None}, {"reward": True}, {"node": "none"}, {"nodes": second["id"]}):
        answer = await rig.http.post("/sessions/default/reward", json={"reward": 1, **wrong})
        assert answer.status_code == 400
    assert "unknown field 'nodes'" in answer.text
    finished = await rig.http.post("/sessions/default/finish")
    assert len(finished.text.splitlines()) == 2
    assert (await rig.http.get("/sessions/default/rows")).status_code == 404


# --- sessions, tenants, budgets --------------------------------------------------------------------------------------


async def test_sessions_by_path_header_and_key(rig: Rig) -> None:
    opened = await rig.post("/sessions", {"session": "ep/1".replace("/", "-"), "max_turns": 2})
    await rig.post(CHAT, body("a"), **{**auth(opened["api_key"]), "X-Claude-Code-Session-Id": "mine"})
    await rig.post("/s/by-path/v1/chat/completions", body("a"))
    await rig.post(CHAT, body("a"), **{"X-Claude-Code-Session-Id": "by-header"})
    await rig.post("/v1/messages", {**body("a"), "max_tokens": 9}, **{"x-api-key": KEY, "Authorization": ""})
    assert [s.id for s in rig.gateway.sessions(rig.gateway.tenant_of(KEY))] == [
        "ep-1", "by-path", "by-header", "default",
    ]  # fmt: skip
    assert [len(await rig.rows(name)) for name in ("ep-1", "by-path", "by-header", "default")] == [1, 1, 1, 1]


async def test_a_session_is_nobody_else_s(rig: Rig) -> None:
    opened = await rig.post("/sessions", {"session": "mine"})
    await rig.post("/s/mine/v1/chat/completions", body("secret"))
    post, get = rig.http.post, rig.http.get
    for key, path, status in (
        ("", "/v1/models", 401),
        ("wrong", "/v1/models", 401),
        (OTHER_KEY, "/sessions/mine/rows", 404),
        (opened["api_key"], "/sessions/mine/rows", 401),  # a harness must not read or reward
        (opened["api_key"], "/sessions", 401),
        (opened["api_key"], "/s/other/v1/models", 403),
        (opened["api_key"], "/s/mine/v1/models", 200),
    ):
        assert (await get(path, headers=auth(key))).status_code == status, (key, path)
    assert (await post("/sessions/mine/reward", json={"reward": 1}, headers=auth(OTHER_KEY))).status_code == 404
    assert (await post("/sessions/mine/reward", json={"reward": 1}, headers=auth(opened["api_key"]))).status_code == 401
    assert (await post("/sessions", json={}, headers={"Origin": "http://evil"})).status_code == 403
    assert (await post("/sessions", json={}, headers={"Host": "evil.example"})).status_code == 403
    other = await post("/s/mine/v1/chat/completions", json=body("a"), headers=auth(OTHER_KEY))
    assert other.status_code == 200  # a session of the other tenant's, of the same name
    assert len(await rig.rows("mine")) == 1


async def test_budgets_are_answered_in_the_wire_s_own_error(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(max_turns=2))
    assert (await rig.post(CHAT, body("a")))["choices"]
    assert (await rig.post(CHAT, body("b")))["choices"]
    answer = await rig.http.post("/v1/messages", json={**body("c"), "max_tokens": 5})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert "max_turns=2" in answer.json()["error"]["message"]
    opened = await rig.post("/sessions", {"session": "few", "max_tokens": 7})
    rig.engine.texts = ["12345", "12345"]
    for finish in ("stop", "length"):
        answer = await rig.post(CHAT, body("a"), **auth(opened["api_key"]))
        assert answer["choices"][0]["finish_reason"] == finish
    refused = await rig.http.post(CHAT, json=body("a"), headers=auth(opened["api_key"]))
    assert refused.json()["error"]["code"] == "budget_exceeded"
    assert sum(sum(row["loss_mask"]) for row in await rig.rows("few")) == 7
    for wrong in (
        {"max_turns": 0},
        {"max_turns": True},
        {"max_turn": 1},
        {"max_tokens": "x"},
        {"max_seconds": -1},
        {"session": "a/b"},
        {"session": "x" * 999},
    ):
        assert (await rig.http.post("/sessions", json=wrong)).status_code == 400
    answer = await rig.http.post("/sessions", json={"sesion": "x"})
    assert "'sesion'; did you mean 'session'?" in answer.text


async def test_bodies_and_sessions_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_BODY", 1000)
    rig = Rig(tokenizer, max_sessions=1)
    answer = await rig.http.post(CHAT, content=b" " * 2000)
    assert answer.status_code == 413
    assert (await rig.http.post("/sessions", json={"session": "second"})).status_code == 503
    other = auth(OTHER_KEY)  # one tenant's sessions leave no other without
    assert (await rig.http.post("/sessions", json={"session": "second"}, headers=other)).status_code == 200
    assert (await rig.http.post("/sessions/default/finish")).status_code == 200
    assert (await rig.http.post("/sessions", json={"session": "second"})).status_code == 200


async def test_a_session_is_opened_with_the_limits_in_force(tokenizer: Tokenizer) -> None:
    rig = Rig(tokenizer, limits=Limits(max_turns=3))
    opened = await rig.post("/sessions", {"max_turns": 50, "max_tokens": 100})
    assert opened["limits"] == {"max_turns": 3, "max_tokens": 100, "max_seconds": None}


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "; clients of OpenAI need a base URL that ends in /v1"),
        ("/s/x/v1/responses/r", ""),
        ("/v1/nothing", ""),
        ("/v1/v1/messages", "; the base URL of this client must not end in /v1"),
    ],
)
async def test_an_unknown_path_names_all_known_and_fits_its_base_url(
    tokenizer: Tokenizer, path: str, advice: str
) -> None:
    """A base URL that ended in /v1 was told to end in /v1."""
    answer = await Rig(tokenizer).http.get(path)
    assert answer.status_code == 404
    assert f"there is no path '{path}'{advice}. Known" in answer.text
    assert all(known in answer.text for known in (*app.WIRES, "/v1/messages/count_tokens", "/v1/models"))


def test_tenants_have_names_and_keys_of_their_own(tokenizer: Tokenizer) -> None:
    for tenants in ([], [Tenant("a", "")], [Tenant("a", "k"), Tenant("a", "l")], [Tenant("a", "k"), Tenant("b", "k")]):
        with pytest.raises(ConfigError):
            Gateway(object(), ChatTemplate(tokenizer), GatewayOptions("m", 9), tenants)  # pyright: ignore[reportArgumentType]
