"""How a chat template writes tool calls: their form, a grammar and a reader.

The form is found by rendering sample calls. A grammar works on text, so a model may spell a marker with other tokens
than the marker's own. `CallForm.read` therefore works on text; `OutputParser` reads calls made without a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import RequestError
from penstock.rollout.chat_template import ChatTemplate

_MARK, _NAME, _VALUE = "penstock7mark3", "penstock7name3", "penstock7value3"
_CALL = re.compile(
    rf"(?P<before>\S.*?){_NAME}(?P<between>.*?)"
    rf'(?:\{{\s*"x"\s*:\s*"{_VALUE}"\s*\}}|(?P<xml><parameter=x>\n?{_VALUE}\n?</parameter>))(?P<after>.*)',
    re.DOTALL,
)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
Grammar = dict[str, Any]
"""One format of vLLM's structural tags."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around a call's name and arguments, and between two calls.

    `separator` None: the template joins calls in another way, so only one is forced. `xml`: the arguments are
    Qwen-Coder's XML; else they are JSON.
    """

    before: str
    between: str
    after: str
    separator: str | None
    xml: bool = False

    @classmethod
    def of(cls, template: ChatTemplate) -> Self | None:
        """Return the form of a template's calls. Or None: no calls are shown, or neither JSON nor XML."""
        call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": {"x": _VALUE}}}
        try:
            closing, one, two = (_after_mark(template, [call] * number) for number in range(3))
        except (RequestError, ValueError):  # the template refuses calls, or omits the text beside them
            return None
        one, two = (text.removesuffix(closing).strip() for text in (one, two))
        if (found := _CALL.fullmatch(one)) is None:
            return None
        several = two.startswith(one) and two.endswith(one)
        separator = two[len(one) : -len(one)] if several else None
        return cls(found["before"], found["between"], found["after"], separator, found["xml"] is not None)

    def grammar(self, tools: Mapping[str, Mapping[str, Any]], *, single: bool) -> Grammar:
        """Return the grammar of one or more calls; `single`: of one.

        `tools` maps names that may be called to the JSON schemas of their parameters.
        """
        kind = "qwen_xml_parameter" if self.xml else "json_schema"
        # Without a limit, a model may write white space until its tokens run out.
        tags = [
            {
                "type": "tag",
                "begin": f"{self.before}{name}{self.between}",
                "content": {"type": kind, "json_schema": dict(schema) or {"type": "object"}, "max_whitespace_cnt": 1},
                "end": self.after,
            }
            for name, schema in tools.items()
        ]
        ends = single or self.separator is None
        more = {"separator": self.separator or "", "at_least_one": True, "stop_after_first": ends}
        return {"type": "tags_with_separator", "tags": tags, **more}

    def read(self, text: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Return the text before the first whole call, and the calls as (name, JSON text)."""
        calls: list[tuple[str, str]] = []
        end = first = -1
        names = "|".join(map(re.escape, tools))
        for found in re.finditer(f"{re.escape(self.before)}({names}){re.escape(self.between)}", text):
            if found.start() < end:  # this match lies within the previous call's arguments
                continue
            stop = self._end_of(text, found.end())
            if stop is None:
                break
            given = text[found.end() : stop].strip()
            calls.append((found[1], xml_arguments(given, tools[found[1]]) if self.xml else given))
            first = found.start() if first < 0 else first
            end = stop + len(self.after)
        return (text[:first].strip() if calls else text), tuple(calls)

    def _end_of(self, text: str, start: int) -> int | None:
        """Return where the arguments end, or None if the text was cut off."""
        try:
            end = text.index(self.after, start) if self.xml else json.JSONDecoder().raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            return None
        return end if text.startswith(self.after, end) else None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The texts around reasoning. `is_open`: the prompt already opened the reasoning; else the model may open it."""

    start: str
    end: str
    is_open: bool


def after_reasoning(calls: Grammar, reasoning: Reasoning) -> Grammar:
    """Return a grammar that lets the model reason before its calls."""
    begin = "" if reasoning.is_open else reasoning.start
    thinking = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": reasoning.end}
    space = {"type": "regex", "pattern": "\\n{0,2}"}
    whole: Grammar = {"type": "sequence", "elements": [thinking, space, calls]}
    return whole if reasoning.is_open else {"type": "or", "elements": [whole, calls]}


def structured_outputs(grammar: Grammar) -> dict[str, Any]:
    """Return the value of `SamplingParams.structured_outputs`."""
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": grammar})}


def xml_arguments(text: str, schema: Mapping[str, Any]) -> str:
    """Return Qwen-Coder's parameters as JSON. A value whose schema type is not `string` is parsed as JSON."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    for name, value in _XML_PARAMETER.findall(text):
        arguments[name] = value
        described: Mapping[str, Any] = properties.get(name) or {}
        if described.get("type", "string") != "string":
            try:
                arguments[name] = json.loads(value)
            except (ValueError, RecursionError):
                continue
    return json.dumps(arguments, ensure_ascii=False)


def _after_mark(template: ChatTemplate, calls: Sequence[Mapping[str, Any]]) -> str:
    answer: dict[str, Any] = {"role": "assistant", "content": _MARK, **({"tool_calls": list(calls)} if calls else {})}
    return template.after((_MARK,), [{"role": "user", "content": "x"}, answer], opening=False)
