"""Chat templates of other families: where messages end, tools' names and places, and ids of calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from wire_clients import WIRES, Chat

from chat_model import TEMPLATE, chat_tokenizer
from gateway_rig import CALL, Rig
from penstock.rollout.chat_template import ChatTemplate

CHAT = "/v1/chat/completions"
LATE_END = TEMPLATE.replace("</tool_call>{% endfor %}<|im_end|>", "</tool_call>{% endfor %}{{ '\\n' }}<|im_end|>")
"""As deepseek-coder's."""


async def test_a_line_before_the_end_of_a_message_ends_no_turn(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path, LATE_END))
    rig.engine.texts = ["one\ntwo\n", "three"]
    first = await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    assert rig.gateway.policy == "extend"
    assert rig.engine.params[0].stop_token_ids == (2,)
    said = first["choices"][0]["message"]
    assert said["content"] == "one\ntwo\n"
    await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]})
    (row,) = await rig.rows()
    text = rig.tokenizer.decode(row["response_ids"], skip_special_tokens=False)
    assert text == "one\ntwo\n<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"


def test_a_sample_that_was_cut_off_gets_the_whole_end(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, LATE_END)
    suffix = ChatTemplate(tokenizer).suffix([{"role": "user", "content": "y"}], last_id=12)
    assert suffix is not None
    assert tokenizer.decode(suffix, skip_special_tokens=False).startswith("\n<|im_end|>\n<|im_start|>user\ny")


def test_a_template_that_ends_messages_by_a_text_stops_at_the_tokenizer_s_end_alone(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    template = ChatTemplate(chat_tokenizer(tmp_path, plain + "{% if add_generation_prompt %}assistant: {% endif %}"))
    assert template.end_ids == (2,)
    assert ChatTemplate(chat_tokenizer(tmp_path / "b", plain.replace("\n\n", "END"))).end_ids == (2,)


# --- tools -----------------------------------------------------------------------------------------------------------


NAMED = TEMPLATE.replace("<tool_response>\n{{ m.content", "<tool_response>\n{{ m.name }}: {{ m.content")
OF_CALL = TEMPLATE.replace(
    "<tool_response>\n{{ m.content",
    "<tool_response>\n{{ messages[loop.index0 - 1].tool_calls[0].function.name }}: {{ m.content",
)
NINE = TEMPLATE.replace(
    "<tool_response>\n{{ m.content",
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}<tool_response>\n{{ m.content",
)
"""As Mistral's of 2024."""
_head, _middle, _tail = TEMPLATE.partition("{% elif messages[0].role == 'system' %}")
LATE_TOOLS = (
    _head[: _head.index("{%- if tools %}")]
    + "{%- if messages[0].role == 'system' %}"
    + _tail.replace(
        "<|im_start|>{{ m.role }}\n",
        "{% if tools and loop.index0 == ns.last %}[TOOLS {{ tools | tojson }}]{% endif %}<|im_start|>{{ m.role }}\n",
        1,
    )
)
"""Tools stand before the last question, as Mistral's."""


async def called(rig: Rig, wire: type[Chat]) -> Chat:
    """Call a tool, and send its result."""
    rig.engine.texts = [CALL, "five"]
    client = wire(rig)
    client.user("x")
    client.echo(await client.ask())
    await client.ask()
    return client


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("policy", ["extend", "faithful"])
@pytest.mark.parametrize("template", [NAMED, OF_CALL], ids=["name", "of call"])
async def test_a_result_has_the_name_of_the_tool_that_was_called(
    tmp_path: Path, template: str, policy: str, wire: type[Chat]
) -> None:
    rig = Rig(chat_tokenizer(tmp_path, template), policy=policy)
    await called(rig, wire)
    assert rig.gateway.policy == policy
    assert "<tool_response>\nadd: 5\n</tool_response>" in rig.tokenizer.decode(rig.engine.seen[-1])


@pytest.mark.parametrize("wire", WIRES)
async def test_ids_of_calls_have_the_length_that_the_template_wants(tmp_path: Path, wire: type[Chat]) -> None:
    rig = Rig(chat_tokenizer(tmp_path, NINE.replace("{{ m.content }}\n", "{{ m.tool_call_id }}: {{ m.content }}\n")))
    await called(rig, wire)
    (row,) = await rig.rows()
    assert [node["cause"] for node in row["nodes"]] == ["", ""]
    text = rig.tokenizer.decode(row["response_ids"])
    assert re.search(r"<tool_response>\n[0-9a-f]{9}: 5\n", text)


async def test_tools_before_the_last_question_are_shown_once(tmp_path: Path) -> None:
    """Each question showed them again, so 100 KB of tools filled the context in a few turns."""
    rig = Rig(chat_tokenizer(tmp_path, LATE_TOOLS))
    rig.engine.texts = ["one", CALL, "two", "three"]
    client = Chat(rig)
    for question in "xyz":
        client.user(question)
        answer = await client.ask()
        client.echo(answer)
        if answer.get("tool_calls"):
            client.echo(await client.ask())
    assert rig.gateway.policy == "extend"
    seen = [rig.tokenizer.decode(ids) for ids in rig.engine.seen]
    assert [text.count("[TOOLS") for text in seen] == [1] * 4
    assert seen[-1].index("two") < seen[-1].index("[TOOLS") < seen[-1].rindex("z")
    causes = [[node["cause"] for node in row["nodes"]] for row in await rig.rows()]
    assert causes == [[""], ["template", ""], ["template"]]  # a result extends its call, a question begins a branch


def test_a_template_whose_results_follow_another_number_of_calls_cannot_be_extended(tmp_path: Path) -> None:
    counted = TEMPLATE.replace("<tool_response>\n{{ m", "<tool_response>\n{{ loop.index0 }}{{ m")
    assert ChatTemplate(chat_tokenizer(tmp_path, counted)).faults()
    with_tools = TEMPLATE.replace("<tool_response>\n{{ m", "<tool_response>\n{{ loop.index0 if tools }}{{ m")
    assert ChatTemplate(chat_tokenizer(tmp_path / "tools", with_tools)).faults()
