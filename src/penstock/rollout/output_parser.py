"""Splits sampled tokens into reasoning, text and tool calls, by their marker ids.

A marker counts only as its own token. The same characters spelled with other tokens, for example in a quotation, are
text. The form is that of Qwen and Hermes: `<think>`, `<tool_call>` with JSON or with Qwen-Coder's XML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.rollout.call_form import CallForm, Reasoning, xml_arguments
from penstock.rollout.tokenizer import Tokenizer

_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed sample. `calls` holds (name, arguments as JSON text), exactly as sampled."""

    text: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]


class OutputParser:
    """Parser for one tokenizer. If the vocabulary has no markers, everything is text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._think, self._end_think = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        self._call, self._end_call = tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>")

    def parse(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]],
        forced: CallForm | None = None,
    ) -> Parsed:
        """Split a sample into reasoning, text and calls.

        Some templates open the reasoning at the end of the prompt. `tools` maps names that may be called to the JSON
        schemas of their parameters; a call of another name is text. `forced`: form of the calls, if a grammar
        constrained the sample.
        """
        ids = list(token_ids)
        reasoning, rest = self._split_reasoning(prompt_ids, ids)
        if rest is None:  # the reasoning did not end, so there is no answer
            return Parsed("", reasoning, ())
        if forced is not None:
            text, calls = forced.read(self._decode(rest), tools)
            return Parsed(text, reasoning, calls)
        text, found = "", list[tuple[str, str]]()
        while self._call is not None and self._call in rest:
            start = rest.index(self._call)
            text += self._decode(rest[:start])
            if self._end_call not in rest[start:]:
                rest = rest[start:]
                break
            end = rest.index(self._end_call, start)
            call = _call_in(self._decode(rest[start + 1 : end]), tools)
            if call is None:
                text += self._decode(rest[start : end + 1])
            else:
                found.append(call)
            rest = rest[end + 1 :]
        text += self._decode(rest)
        return Parsed(text.strip("\n") if found or reasoning is not None else text, reasoning, tuple(found))

    def reasoning_before_calls(self, prompt_ids: Sequence[int]) -> Reasoning | None:
        """Return how reasoning is marked, opened by the prompt or by the model; or None without markers."""
        if self._think is None or self._end_think is None:
            return None
        return Reasoning("<think>", "</think>", is_open=self._is_open(prompt_ids))

    def _split_reasoning(self, prompt_ids: Sequence[int], ids: list[int]) -> tuple[str | None, list[int] | None]:
        begins = self._think is not None and self._is_open(prompt_ids)
        at = ids.index(self._think) if self._think in ids[:3] else None
        if not begins and at is not None and not self._shown(ids[:at]).strip():  # white space may precede it
            begins, ids = True, ids[at + 1 :]
        if not begins:
            return None, ids
        if self._end_think not in ids:
            return self._decode(ids).strip("\n"), None
        end = ids.index(self._end_think)
        return self._decode(ids[:end]).strip("\n"), ids[end + 1 :]

    def _is_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends in the start marker, followed by at most white space."""
        tail = list(prompt_ids[-4:])
        if self._think not in tail:
            return False
        after = tail[len(tail) - tail[::-1].index(self._think) :]
        return self._end_think not in after and not self._shown(after).strip()

    def _shown(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""


def _call_in(text: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the call between two markers, or None if it is no call of a given tool."""
    if xml := _XML_CALL.fullmatch(text):
        found = xml_arguments(xml[2], tools.get(xml[1], {}))
        return (xml[1], found) if xml[1] in tools else None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    fields = cast("dict[str, Any]", call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        return None
    return str(name), _as_sampled(text, cast("dict[str, Any]", arguments))


def _as_sampled(text: str, arguments: dict[str, Any]) -> str:
    """Return the arguments of a call exactly as the text spells them."""
    for match in _ARGUMENTS.finditer(text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:  # this match lies within a string
            continue
        if value == arguments:
            return text[match.end() : end]
    return json.dumps(arguments)
