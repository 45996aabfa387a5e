"""`tool_choice` that forces a call: the grammar that goes to the engine, and what its answer becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chat_model import TEMPLATE, chat_tokenizer
from gateway_rig import KEY, THOUGHT, Rig, calls_of
from penstock.errors import UserError
from penstock.rollout.call_form import CallForm
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.tokenizer import Tokenizer
from penstock.train.grpo import _count_policy_tokens

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLED = '<tool_call>\n{"name": "sub", "arguments": {"a":  1}}\n</tool_call>'
JSON = "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
XML = TEMPLATE.replace(
    f'{{"name": "{{{{ call.function.name }}}}", "arguments": {JSON}}}',
    "<function={{ call.function.name }}>\n{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>",
)
"""As Qwen3-Coder has it."""
FUNCTIONS = [{"name": name, "description": "", "parameters": SCHEMA} for name in ("add", "sub")]
CHAT = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSES = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGES = [{"name": f["name"], "description": "", "input_schema": f["parameters"]} for f in FUNCTIONS]
QUESTION = [{"role": "user", "content": "go"}]
WIRES: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": (
        "/v1/chat/completions", {"messages": QUESTION, "tools": CHAT}, "required",
        {"type": "function", "function": {"name": "sub"}},
    ),
    "responses": (
        "/v1/responses", {"input": "go", "tools": RESPONSES}, "required", {"type": "function", "name": "sub"},
    ),
    "messages": (
        "/v1/messages", {"messages": QUESTION, "tools": MESSAGES, "max_tokens": 400}, {"type": "any"},
        {"type": "tool", "name": "sub"},
    ),
}  # fmt: skip


def grammar_of(rig: Rig) -> dict[str, Any]:
    given = rig.engine.params[-1].structured_outputs
    assert given is not None
    whole = json.loads(given["structural_tag"])["format"]
    assert whole["type"] == "or", "the model may think before"
    assert whole["elements"][0]["elements"][-1] == whole["elements"][1]
    return whole["elements"][1]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_call_is_forced_over_every_wire(tmp_path: Path, wire: str) -> None:
    path, body, required, named = WIRES[wire]
    rig = Rig(chat_tokenizer(tmp_path))
    for choice, names in ((required, ["add", "sub"]), (named, ["sub"])):
        rig.engine.texts = [f"{THOUGHT}{CALLED}"]
        answer = await rig.post(path, {**body, "tool_choice": choice})
        assert calls_of(answer) == [("sub", {"a": 1})]
        grammar = grammar_of(rig)
        assert [tag["begin"] for tag in grammar["tags"]] == [
            f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
        ]
        assert grammar["tags"][0]["content"]["json_schema"] == SCHEMA
        assert (grammar["tags"][0]["end"], grammar["separator"]) == ("}\n</tool_call>", "\n")
        assert grammar["stop_after_first"] == (names == ["sub"])
    rig.engine.texts = ["done"]
    await rig.post(path, body)
    assert rig.engine.params[-1].structured_outputs is None
    rows = await rig.rows()
    assert [node["constrained"] for row in rows for node in row["nodes"]] == [True, True, False]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_choice_that_cannot_be_made_is_refused(tmp_path: Path, wire: str) -> None:
    path, body, required, named = WIRES[wire]
    rig = Rig(chat_tokenizer(tmp_path))
    for more, why in (
        ({"tool_choice": required, "tools": []}, "has no tools"),
        ({"tool_choice": json.loads(json.dumps(named).replace("sub", "mul"))}, "'mul', which is no tool"),
        ({"tool_choice": {"type": "web_search"}}, "not served here"),
    ):
        answer = await rig.http.post(path, json={**body, **more})
        assert answer.status_code == 400
        assert why in answer.text
    assert rig.engine.seen == []


async def test_a_call_is_not_forced_where_turns_are_trained_on(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path), force_calls=False)
    path, body, required, _ = WIRES["chat"]
    await rig.post(path, {**body, "tool_choice": required})
    assert rig.engine.params[-1].structured_outputs is None
    assert [node["constrained"] for row in await rig.rows() for node in row["nodes"]] == [False]


async def test_some_of_the_tools_are_allowed(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path))
    rig.engine.texts = [CALLED, "done"]
    path, body, *_ = WIRES["responses"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    await rig.post(path, {**body, "tool_choice": allowed})
    assert len(grammar_of(rig)["tags"]) == 1
    await rig.post(path, {**body, "tool_choice": {**allowed, "mode": "auto"}})
    assert rig.engine.params[-1].structured_outputs is None


async def test_a_marker_spelled_by_other_tokens_is_a_call_under_a_grammar_alone(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    rig = Rig(tokenizer)
    spelled = [token for character in f"{CALLED}\n{CALLED}" for token in tokenizer.encode_exact(character)]
    path, body, required, _ = WIRES["chat"]
    for choice, calls in ((required, [("sub", {"a": 1})] * 2), ("auto", [])):
        rig.engine.ids = [spelled]
        answer = await rig.post(path, {**body, "tool_choice": choice})
        assert calls_of(answer) == calls
    cut = {**body, "tool_choice": required, "max_tokens": 40}
    rig.engine.ids = [spelled]
    answer = await rig.post(path, cut)
    assert (calls_of(answer), answer["choices"][0]["finish_reason"]) == ([], "length")


async def test_rows_made_under_a_grammar_are_exact_and_not_trained_on(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path))
    path, body, required, _ = WIRES["chat"]
    rig.engine.texts = [CALLED, "It is 2"]
    answer = await rig.post(path, {**body, "tool_choice": required})
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"}
    await rig.post(path, {**body, "messages": [*QUESTION, message, result]})
    await rig.rows()  # checked against what the engine saw
    (row,) = rig.gateway.find(rig.gateway.tenant_of(KEY), "default").rows()  # type: ignore[arg-type]
    trajectory = row.trajectory(reward=1.0)
    assert len(trajectory.constrained) == len(trajectory.response_ids)
    assert sum(trajectory.constrained) == len(rig.engine.made[0])
    with pytest.raises(UserError, match=rf"{len(rig.engine.made[0])} tokens .* sampled under a grammar"):
        _count_policy_tokens([trajectory])
    mask = tuple(m * (not c) for m, c in zip(trajectory.loss_mask, trajectory.constrained, strict=True))
    assert _count_policy_tokens([replace(trajectory, loss_mask=mask)]) == len(rig.engine.made[1])


def form_of(tokenizer: Tokenizer) -> CallForm | None:
    return CallForm.of(ChatTemplate(tokenizer))


def test_the_form_of_calls_is_found_by_rendering_some(tmp_path: Path) -> None:
    assert XML != TEMPLATE
    coder = form_of(chat_tokenizer(tmp_path / "xml", XML))
    assert coder == CallForm("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n", xml=True)
    schema = {"f": {"properties": {"a": {"type": "integer"}}}}
    said = "so:\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert coder.read(f"{said}\n<tool_call>\n<function=f>\n", schema) == ("so:", (("f", '{"a": 1}'),))
    assert coder.grammar(schema, single=True)["tags"][0]["content"]["type"] == "qwen_xml_parameter"
    listed = TEMPLATE.replace(f'"arguments": {JSON}', f'"parameters": {JSON}')
    assert listed != TEMPLATE
    form = form_of(chat_tokenizer(tmp_path / "named", listed))
    assert form is not None
    assert form.between == '", "parameters": '
    silent = TEMPLATE.replace("call.function.name", "'f'")
    assert form_of(chat_tokenizer(tmp_path / "silent", silent)) is None
