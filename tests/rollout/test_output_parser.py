"""Tool calls and reasoning by the ids of their markers."""

from __future__ import annotations

import pytest

from chat_model import chat_tokenizer
from penstock.rollout.output_parser import OutputParser, Parsed
from penstock.rollout.tokenizer import Tokenizer

TOOLS = {"add": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1,"note": "x"}}\n</tool_call>'
PARAMETERS = "<parameter=a>\n1\n</parameter>\n<parameter=note>\n1\n</parameter>"
XML = f"<tool_call>\n<function=add>\n{PARAMETERS}\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize(
    ("prompt", "text", "parsed"),
    [
        ("", "hello<|im_end|>", Parsed("hello", None, ())),
        ("", f"{CALL}<|im_end|>", Parsed("", None, (("add", '{"a":  1,"note": "x"}'),))),
        ("", f"so\n{CALL}\n{CALL}", Parsed("so", None, (("add", '{"a":  1,"note": "x"}'),) * 2)),
        ("", XML, Parsed("", None, (("add", '{"a": 1, "note": "1"}'),))),
        ("", "<think>\nhm\n</think>\n\nyes", Parsed("yes", "hm", ())),
        ("<think>\n", "hm\n</think>\n\nyes", Parsed("yes", "hm", ())),
        ("<think>\n\n</think>\n\n", "yes", Parsed("yes", None, ())),
        ("", "\n<think>\nhm\n</think>\n\nyes", Parsed("yes", "hm", ())),
        ("", "N<think>\nhm\n</think>\nyes", Parsed("N<think>\nhm\n</think>\nyes", None, ())),  # none of it is lost
        ("<think><|im_end|><|im_start|>", "yes", Parsed("yes", None, ())),  # a user's text ended with the marker
        ("", f"<think>\n{CALL}", Parsed("", CALL, ())),  # an unclosed reasoning channel yields no call
        ("", f"<think>\n{CALL}</think>no", Parsed("no", CALL, ())),
        ("", CALL.removesuffix("</tool_call>"), Parsed(CALL.removesuffix("</tool_call>"), None, ())),
        ("", CALL.replace("add", "drop"), Parsed(CALL.replace("add", "drop"), None, ())),  # no such tool
        ("", CALL.replace('"add"', '["add"]'), Parsed(CALL.replace('"add"', '["add"]'), None, ())),
        ("", CALL.replace("{", "", 1), Parsed(CALL.replace("{", "", 1), None, ())),
    ],
)
def test_samples_are_taken_apart(tokenizer: Tokenizer, prompt: str, text: str, parsed: Parsed) -> None:
    ids = tokenizer.encode_exact(text)
    assert OutputParser(tokenizer).parse(tokenizer.encode_exact(f"a{prompt}"), ids, TOOLS) == parsed


def test_a_marker_spelled_by_other_tokens_is_text(tokenizer: Tokenizer) -> None:
    ids = [token for character in CALL for token in tokenizer.encode_exact(character)]
    assert OutputParser(tokenizer).parse([], ids, TOOLS) == Parsed(CALL, None, ())
