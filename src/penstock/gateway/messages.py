"""One canonical message, request and answer, which the dialects translate from and to."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import orjson

from penstock.errors import PenstockError

Role = Literal["system", "user", "assistant", "tool"]
WireFinish = Literal["stop", "length", "tool_calls", "abort"]

MINTED = re.compile(r"(?:(?:call|toolu|fc|ctc|msg|rs|sig|resp)_|chatcmpl-)([0-9a-f]{24})(?![0-9a-f])")
"""An id of ours: 24 hexadecimal digits, behind a prefix that says of what."""


_CALLS_AS_TEXT = re.compile(r"(?:Calling tools:)?\s*(\[.*\])", re.DOTALL)
"""How smolagents writes calls, behind the text of their turn."""
_EXACT = 2**53
"""Whole numbers below it are exact as floats."""
UNKNOWN_THREAD = "thread_not_found"


class GatewayError(PenstockError):
    """A request that is answered with an error, in the form of its wire."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `id` is the bare minted id, or a foreign id as it came; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and arguments, equal for equal JSON."""
        try:
            return self.name, json.dumps(json.loads(self.arguments, parse_float=_number), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments.strip()

    def as_custom(self) -> ToolCall:
        """Return the call as its harness sends it back, of a tool whose input is plain text: JSON, if it was none."""
        given = self.parsed()
        text = given.get("input", self.arguments) if isinstance(given, dict) else given
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return replace(self, arguments=json.dumps({"input": text}, ensure_ascii=False))

    def parsed(self) -> dict[str, Any] | str:
        """Return the arguments as an object; those that are no object, as their text."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return cast("dict[str, Any]", value) if isinstance(value, dict) else self.arguments


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of any wire.

    Attributes:
        role: `developer` counts as `system`.
        text: joined text parts.
        reasoning: of an assistant; None or empty: the harness did not send it.
        calls: of an assistant.
        call_id: of a tool's result, as `ToolCall.id`.
        name: of the tool.
        minted: ids of ours found in the message, bare.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    minted: tuple[str, ...] = ()

    @property
    def key(self) -> bytes:
        """Meaning as bytes: white space around the text and the form of JSON are left out, and so is reasoning."""
        calls = [call.meaning for call in self.calls]
        return orjson.dumps([self.role, self.text.strip(), calls, self.call_id])

    def agrees(self, ours: ChatMessage) -> str:
        """Compare an assistant's message that came back with what we sent; return the difference, empty for none."""
        if [call.meaning for call in self.calls] != [call.meaning for call in ours.calls]:
            return "" if not self.calls and self._writes(ours) else "edited arguments"
        if self.text.strip() != ours.text.strip():
            return "edited text"
        thought = (self.reasoning or "").strip()  # some clients send an empty text for what they dropped
        return "edited reasoning" if thought and thought != (ours.reasoning or "").strip() else ""

    def _writes(self, ours: ChatMessage) -> bool:
        """Whether the text is that of `ours`, with its calls written behind it and nothing else."""
        text, head = self.text.strip(), ours.text.strip()
        match = _CALLS_AS_TEXT.fullmatch(text[len(head) :].strip()) if text.startswith(head) else None
        if match is None or not all(call.id in self.minted for call in ours.calls):
            return False
        try:  # a text that is no list of calls raises one of these
            calls = [_written_call(given) for given in ast.literal_eval(match[1])]
        except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
            return False
        return sorted(calls) == sorted((call.id, *call.meaning) for call in ours.calls)

    def for_template(self) -> dict[str, Any]:
        """Return the form that chat templates read."""
        if self.role == "tool":
            return {"role": "tool", "content": self.text, "tool_call_id": self.call_id, "name": self.name}
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.parsed()}}
                for c in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `custom`: a tool of the Responses API whose input is plain text."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    custom: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a harness asks for, of any wire.

    Attributes:
        messages: of the whole conversation.
        tools: in the order given.
        max_tokens: None: as many as fit.
        sampling: parameters under vLLM's names, those given alone.
        stream: answer as events.
        model: the name asked for, which is sent back.
        previous: bare id of the node that the conversation continues (`previous_response_id`, or Anthropic's threads).
        thread: system prompt and tools are those of the turn that it continues.
        include_usage: a stream of chat completions ends with its usage.
        notes: what was asked for and is not done.
        forced: names of tools, one of which the turn has to call; empty: the model decides.
        single_call: a forced turn makes one call.
        has_instructions: the first message replaces the system prompt of the conversation that `previous` names.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    stream: bool = False
    model: str = ""
    previous: str = ""
    thread: bool = False
    include_usage: bool = False
    notes: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()
    single_call: bool = False
    has_instructions: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn. `id` is the node's; `message` has minted ids."""

    id: str
    message: ChatMessage
    finish: WireFinish
    prompt_tokens: int
    output_tokens: int
    request: ChatRequest
    created: int


def _written_call(given: dict[str, Any]) -> tuple[str, str, str]:
    """Read a call that a text shows as a Python literal: its bare id and its meaning."""
    function = given.get("function", given)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    wire_id = bare(str(given.get("id")))
    return (wire_id, *ToolCall(wire_id, str(function.get("name")), text).meaning)


def _number(text: str) -> float:
    """Read a number of JSON; 1.0 is equal to 1."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def bare(wire_id: str) -> str:
    """Return a wire's id without our prefix; a foreign id stays as it is."""
    match = MINTED.fullmatch(wire_id)
    return match[1] if match else wire_id


def minted_in(text: str) -> tuple[str, ...]:
    """Ids of ours in a text: some harnesses write a call into the assistant's text."""
    return tuple(MINTED.findall(text)) if "_" in text else ()


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Hash of the tools as the template shows them."""
    shown = [tool.for_template() for tool in tools]
    return hashlib.blake2b(orjson.dumps(shown, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def with_names(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Name the tools of results by the calls that they answer: two wires have no such name, and templates show it."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return tuple(
        replace(m, name=names[m.call_id]) if m.role == "tool" and not m.name and m.call_id in names else m
        for m in messages
    )


def merged(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join the leading system messages into one, since most templates take one."""
    leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if leading < 2:  # noqa: PLR2004
        return tuple(messages)
    text = "\n\n".join(message.text for message in messages[:leading])
    return (replace(messages[0], text=text), *messages[leading:])
