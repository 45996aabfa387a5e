"""Tool calls and reasoning by vLLM's own parsers, for the families that our own does not know."""

from __future__ import annotations

import json
import sys

import pytest

from chat_model import chat_tokenizer
from penstock.errors import ConfigError
from penstock.rollout.call_form import CallForm, Reasoning
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.output_parser import OutputParser, Parsed
from penstock.rollout.tokenizer import Tokenizer
from penstock.rollout.vllm_parser import VllmOutputParser, output_parser

pytestmark = pytest.mark.vllm

TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}
FAMILIES = ("<|python_tag|>", "<|eom_id|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
GRANITE = "Here is my thought process: hm Here is my response:"
ONE = (("add", '{"a": 1}'),)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = chat_tokenizer(tmp_path_factory.mktemp("chat"))
    made.huggingface.add_tokens(list(FAMILIES), special_tokens=True)
    return made


@pytest.mark.parametrize(
    ("parsers", "prompt", "text", "parsed"),
    [
        ("llama3_json", "", f"<|python_tag|>{LLAMA}", Parsed("", None, ONE)),
        ("llama3_json", "", "no {call}", Parsed("no {call}", None, ())),
        ("llama3_json", "", LLAMA.replace("add", "drop"), Parsed(LLAMA.replace("add", "drop"), None, ())),
        ("mistral", "", '[TOOL_CALLS]add[ARGS]{"a": 1}', Parsed("", None, ONE)),
        ("mistral mistral", "", '[THINK]hm[/THINK]so[TOOL_CALLS]add[ARGS]{"a": 1}', Parsed("so", "hm", ONE)),
        ("pythonic", "", "[add(a=1), add(a=1)]", Parsed("", None, ONE * 2)),
        ("hermes", "", f"so\n{CALL}{CALL}", Parsed("so", None, ONE * 2)),
        ("hermes", "", CALL.replace('"add"', "add"), Parsed(CALL.replace('"add"', "add"), None, ())),
        ("hermes deepseek_r1", "", f"<think>\nhm\n</think>\n\nso{CALL}", Parsed("so", "hm", ONE)),
        ("hermes deepseek_r1", "<think>\n", f"hm</think>{CALL}", Parsed("", "hm", ONE)),
        ("hermes deepseek_r1", "<think>\n", f"hm{CALL}", Parsed("", f"hm{CALL}", ())),  # never closed, so no call
        ("hermes deepseek_r1", "<think>\n\n</think>\n\n", f"so{CALL}", Parsed("so", None, ONE)),
        ("- deepseek_r1", "", f"hm</think>{CALL}", Parsed(CALL, "hm", ())),
        ("hermes granite", "", f"{GRANITE} so{CALL}", Parsed(" so", " hm ", ONE)),
        ("hermes", "", "yes<|eom_id|>", Parsed("yes", None, ())),
    ],
)
def test_samples_are_taken_apart(tokenizer: Tokenizer, parsers: str, prompt: str, text: str, parsed: Parsed) -> None:
    tool, reasoning = (None if name == "-" else name for name in [*parsers.split(), "-"][:2])
    parser = output_parser(tokenizer, tool_parser=tool, reasoning_parser=reasoning)
    assert isinstance(parser, VllmOutputParser)
    ids = tokenizer.encode_exact(text)
    assert parser.parse(tokenizer.encode_exact(f"a{prompt}"), ids, TOOLS) == parsed
    assert parser.parse(tokenizer.encode_exact(f"a{prompt}"), ids, {}).calls == ()


@pytest.mark.parametrize("parsers", [("hermes", None), ("hermes", "deepseek_r1"), ("mistral", "mistral")])
def test_a_marker_spelled_by_other_tokens_is_text(tokenizer: Tokenizer, parsers: tuple[str, str | None]) -> None:
    parser = output_parser(tokenizer, tool_parser=parsers[0], reasoning_parser=parsers[1])
    quoted = f'see <think> and </think> {CALL} and [TOOL_CALLS]add[ARGS]{{"a": 1}} or <|im_end|>'
    ids = [token for character in quoted for token in tokenizer.encode_exact(character)]
    given = tokenizer.encode_exact("<think>\n</think>" if parsers[1] == "deepseek_r1" else "x")
    assert parser.parse(given, ids, TOOLS) == Parsed(quoted, None, ())


def test_an_argument_quotes_a_marker(tokenizer: Tokenizer) -> None:
    parser = output_parser(tokenizer, tool_parser="hermes")
    before, after = '<tool_call>{"name": "add", "arguments": {"note": "', '"}}</tool_call>'
    quoted = [token for character in "</tool_call>" for token in tokenizer.encode_exact(character)]
    parsed = parser.parse([], [*tokenizer.encode_exact(before), *quoted, *tokenizer.encode_exact(after)], TOOLS)
    assert parsed.calls == (("add", json.dumps({"note": "</tool_call>"})),)


def test_a_forced_call_is_read_by_its_form_after_the_reasoning(tokenizer: Tokenizer) -> None:
    parser = output_parser(tokenizer, tool_parser="mistral", reasoning_parser="mistral")
    form = CallForm.of(ChatTemplate(tokenizer))
    ids = tokenizer.encode_exact(f"[THINK]hm[/THINK]{CALL}")
    assert parser.parse([], ids, TOOLS, form) == Parsed("", "hm", (("add", '{"a":  1}'),))
    opened, closed = (tokenizer.encode_exact(f"x{text}\n") for text in ("[THINK]", "[THINK][/THINK]"))
    assert parser.reasoning_before_calls(opened) == Reasoning("[THINK]", "[/THINK]", is_open=True)
    assert parser.reasoning_before_calls(closed) is None


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"tool_parser": "hermse"}, "vLLM has no tool parser 'hermse'; it has .*hermes, "),
        ({"reasoning_parser": "r1"}, "vLLM has no reasoning parser 'r1'; it has .*deepseek_r1"),
        ({"tool_parser": "jamba"}, "vLLM's parser jamba does not fit this model's tokenizer: "),
        ({"tool_parser": "openai", "reasoning_parser": "openai_gptoss"}, "openai, openai_gptoss does not fit"),
    ],
)
def test_a_parser_that_cannot_be_had_is_one_error(tokenizer: Tokenizer, names: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        output_parser(tokenizer, **names)


def test_without_vllm_a_name_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.parser.parser_manager", None)
    with pytest.raises(ConfigError, match=r"need vLLM beside the gateway: pip install 'penstock\[vllm\]'"):
        output_parser(tokenizer, tool_parser="hermes")


def test_without_names_our_own_parser_reads_and_says_where_it_cannot(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(output_parser(tokenizer), OutputParser)
    assert caplog.messages == []
    monkeypatch.setattr(tokenizer, "token_id", lambda _: None)
    output_parser(tokenizer)
    assert "name one of vLLM's parsers" in caplog.messages[0]


def test_a_parser_that_fails_leaves_the_answer_as_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.parser.abstract_parser import DelegatingParser

    parser = output_parser(tokenizer, tool_parser="hermes")

    def fail(*_: object, **__: object) -> None:
        raise IndexError("odd text")

    monkeypatch.setattr(DelegatingParser, "parse", fail)
    assert parser.parse([], tokenizer.encode_exact(CALL), TOOLS) == Parsed(CALL, None, ())
    assert "odd text" in caplog.text
