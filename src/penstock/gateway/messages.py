"""The common form of messages, requests and answers. Each dialect translates between it and a wire."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import orjson

from penstock.errors import PenstockError, UserError
from penstock.rollout.tokenizer import PromptTooLongError
from penstock.types import FinishReason

Role = Literal["system", "user", "assistant", "tool"]
WireFinish = FinishReason | Literal["tool_calls"]

MINTED = re.compile(r"(?:(?:call|toolu|fc|ctc|msg|rs|sig|resp)_|chatcmpl-)([0-9a-f]{24})(?![0-9a-f])")
"""A minted id (one made by the gateway): 24 hexadecimal digits after a prefix that names the kind of object."""


_CALLS_AS_TEXT = re.compile(r"(?:Calling tools:)?\s*(\[.*\])", re.DOTALL)
"""The form in which smolagents writes calls after the text of their turn."""
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""
UNKNOWN_THREAD = "thread_not_found"
TOO_LONG = "context_length_exceeded"


class GatewayError(PenstockError):
    """A failed request. The answer is an error in the form of its wire."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @classmethod
    def of(cls, error: GatewayError | UserError) -> GatewayError:
        """Return the error that a wire shows."""
        if isinstance(error, GatewayError):
            return error
        return cls(str(error), code=TOO_LONG if isinstance(error, PromptTooLongError) else "invalid_request")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `id` is a bare minted id, or a foreign id unchanged. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def meaning(self) -> tuple[str, str]:
        """Name and arguments in a form that is equal for equal JSON."""
        try:
            return self.name, json.dumps(json.loads(self.arguments, parse_float=_number), sort_keys=True)
        except (ValueError, RecursionError):
            return self.name, self.arguments.strip()

    def as_custom(self) -> ToolCall:
        """Return the call of a plain-text tool as its harness sends it back. Its input is wrapped as JSON."""
        given = self.parsed()
        text = given.get("input", self.arguments) if isinstance(given, dict) else given
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        return replace(self, arguments=json.dumps({"input": text}, ensure_ascii=False))

    def parsed(self) -> dict[str, Any] | str:
        """Return the arguments as an object, or as text if they are no object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return cast("dict[str, Any]", value) if isinstance(value, dict) else self.arguments


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of any wire.

    Attributes:
        role: role of the author; `developer` counts as `system`.
        reasoning: reasoning of an assistant; None or empty: the harness did not send it.
        call_id: id of the call that a tool result answers, as in `ToolCall.id`.
        minted: minted ids found in the message, without prefix.
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
        """Meaning as bytes. White space around the text, the layout of JSON, and reasoning do not count."""
        calls = [call.meaning for call in self.calls]
        return orjson.dumps([self.role, self.text.strip(), calls, self.call_id])

    def agrees(self, ours: ChatMessage) -> str:
        """Return how an assistant's message differs from the one that we sent. Empty: it does not."""
        if [call.meaning for call in self.calls] != [call.meaning for call in ours.calls]:
            return "" if not self.calls and self._writes(ours) else "edited arguments"
        if self.text.strip() != ours.text.strip():
            return "edited text"
        thought = (self.reasoning or "").strip()  # some clients send an empty text for dropped reasoning
        return "edited reasoning" if thought and thought != (ours.reasoning or "").strip() else ""

    def _writes(self, ours: ChatMessage) -> bool:
        """Whether the text is that of `ours` followed by its calls, and nothing else."""
        text, head = self.text.strip(), ours.text.strip()
        match = _CALLS_AS_TEXT.fullmatch(text[len(head) :].strip()) if text.startswith(head) else None
        if match is None or not all(call.id in self.minted for call in ours.calls):
            return False
        try:  # a text that is not a list of calls raises one of the errors below
            calls = [_written_call(given) for given in ast.literal_eval(match[1])]
        except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
            return False
        return sorted(calls) == sorted((call.id, *call.meaning) for call in ours.calls)

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
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
        """Return the tool in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A harness's request, independent of its wire.

    Attributes:
        max_tokens: limit of sampled tokens; None: as many as fit.
        sampling: given parameters, under vLLM's names.
        model: requested model name, which is sent back.
        previous: bare id of the node that the conversation continues (`previous_response_id`, or Anthropic's threads).
        thread: take system prompt and tools from the turn that the request continues.
        include_usage: end a stream of chat completions with its usage.
        forced: names of tools of which the turn must call one; empty: the model decides.
        single_call: a forced turn makes exactly one call.
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
    forced: tuple[str, ...] = ()
    single_call: bool = False
    has_instructions: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn. `id` is the node's id; `message` has minted ids."""

    id: str
    message: ChatMessage
    finish: WireFinish
    prompt_tokens: int
    output_tokens: int
    request: ChatRequest
    created: int


def _written_call(given: dict[str, Any]) -> tuple[str, str, str]:
    """Read a call written as a Python literal. Return its bare id and its meaning."""
    function = given.get("function", given)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    wire_id = bare(str(given.get("id")))
    return (wire_id, *ToolCall(wire_id, str(function.get("name")), text).meaning)


def _number(text: str) -> float:
    """Read a JSON number, so that 1.0 equals 1."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def bare(wire_id: str) -> str:
    """Return a wire's id without our prefix. A foreign id stays as it is."""
    match = MINTED.fullmatch(wire_id)
    return match[1] if match else wire_id


def minted_in(text: str) -> tuple[str, ...]:
    """Return the minted ids in a text. Some harnesses write calls into the assistant's text."""
    return tuple(MINTED.findall(text)) if "_" in text else ()


def tools_key(tools: Sequence[Tool]) -> bytes:
    """Return a hash of the tools in the form that the template shows."""
    shown = [tool.for_template() for tool in tools]
    return hashlib.blake2b(orjson.dumps(shown, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def with_names(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Name the tools of results after their calls. Two wires omit this name, but templates show it."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return tuple(
        replace(m, name=names[m.call_id]) if m.role == "tool" and not m.name and m.call_id in names else m
        for m in messages
    )


def merged(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join the leading system messages into one. Most templates accept only one."""
    leading = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if leading < 2:  # noqa: PLR2004
        return tuple(messages)
    text = "\n\n".join(message.text for message in messages[:leading])
    return (replace(messages[0], text=text), *messages[leading:])
