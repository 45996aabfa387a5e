"""The shared part of the wire formats: reading of fields, and a dialect's interface."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

from penstock.gateway.messages import Answer, ChatMessage, ChatRequest, GatewayError, Tool

KEEPALIVE = b": keepalive\n\n"
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos"),
)
_REFUSED = frozenset(
    (
        *("audio", "background", "container", "conversation", "echo", "function_call", "functions", "guided_json"),
        *("logit_bias", "mcp_servers", "modalities", "output_config", "output_format", "prediction", "prompt"),
        *("response_format", "structured_outputs", "text", "web_search_options"),
    )
)
"""Fields that would change the answer. Other unknown fields are ignored."""
_FORMATS = ("output_config", "output_format", "response_format", "text")
_PLAIN: tuple[Any, ...] = (None, False, "", "text", [], {}, ["text"])
_NOT_FORCED = ("none", "auto", None)
_FORCED = ("required", "any")
_NAMED = ("function", "custom", "tool")


class Dialect(ABC):
    """One wire format: it reads requests, and writes answers, events and errors."""

    limits: Sequence[str]
    """Fields that limit the sampled tokens. The first one given counts."""
    stop = "stop"
    """Field of the stop strings."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Read a request. GatewayError: it asks for something unsupported."""
        _refuse_unserved(body)
        choice = body.get("tool_choice")
        fields = cast("dict[str, Any]", choice if isinstance(choice, dict) else {"type": choice})
        tools = () if fields.get("type") == "none" else tuple(self.tools(body.get("tools") or ()))
        is_single = body.get("parallel_tool_calls") is False or fields.get("disable_parallel_tool_use") is True
        return ChatRequest(
            messages=tuple(self.messages(body)),
            tools=tools,
            max_tokens=next((body[name] for name in self.limits if body.get(name) is not None), None),
            sampling=_sampling_of(body, self.stop),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            forced=_forced_tools(fields, tools),
            single_call=is_single or fields.get("type") in _NAMED,
        )

    @abstractmethod
    def messages(self, body: Mapping[str, Any]) -> Iterable[ChatMessage]:
        """Read the messages of a request."""

    @abstractmethod
    def tools(self, given: Iterable[Mapping[str, Any]]) -> Iterable[Tool]:
        """Read the tools of a request."""

    @abstractmethod
    def write(self, answer: Answer) -> dict[str, Any]:
        """Write a finished turn as one body."""

    @abstractmethod
    def events(self, answer: Answer) -> Iterator[bytes]:
        """Write a finished turn as server-sent events. The last event marks it as complete."""

    def error(self, error: GatewayError) -> dict[str, Any]:
        """Write an error as a body, in OpenAI's form."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"  # noqa: PLR2004
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def error_event(self, error: GatewayError) -> bytes:
        """Write an error as the last event of a stream that has started."""
        return event("error", self.error(error))


def event(name: str | None, data: Mapping[str, Any]) -> bytes:
    """Write one event. Some wire formats do not name their events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(data) + b"\n\n"


def dumps(data: Any) -> bytes:
    """Write JSON. orjson refuses integers over 64 bits and lone surrogates, which a tool call may hold."""
    try:
        return orjson.dumps(data)
    except TypeError:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()


def _sampling_of(body: Mapping[str, Any], stop: str) -> dict[str, Any]:
    """Return a body's sampling parameters under vLLM's names."""
    found = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    stops = body.get(stop)
    if stops:
        texts = cast("list[Any]", [stops] if isinstance(stops, str) else stops)
        if type(texts) is not list or not all(isinstance(text, str) for text in texts):
            raise GatewayError(f"{stop} is a text or a list of texts, got {str(stops)[:80]}")
        found["stop"] = texts
    return found


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    """Raise GatewayError for a field that cannot be ignored."""
    for name in sorted(body.keys() & _REFUSED):
        value = _format_of(body[name]) if name in _FORMATS else body[name]
        if value not in _PLAIN:
            raise GatewayError(f"{name} is not served here, got {str(body[name])[:80]}; leave it out")


def _format_of(value: Any) -> Any:
    """Return the kind of output that a field requests."""
    while isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        value = fields.get("format", fields.get("type"))
    return value


def listed(given: Any, name: str) -> list[Any]:
    """Return the messages of a request. GatewayError: they are not a list."""
    if not isinstance(given, list):
        raise GatewayError(f"{name} is a list, got {str(given)[:80]}")
    return cast("list[Any]", given)


def text_of(content: Any, kinds: Sequence[str] = ("text", "input_text", "output_text", "refusal")) -> str:
    """Join the text parts of a message's content. GatewayError: a part is not text, for example an image."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise GatewayError(f"a message's content is a text or a list of parts, got {str(content)[:80]}")
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and (fields := cast("dict[str, Any]", part)).get("type") in kinds:
            texts.append(str(fields.get("text") or fields.get("refusal") or ""))
        else:
            raise GatewayError(f"only text is served here, got a part {str(cast('Any', part))[:80]}")
    return "\n".join(texts)


def _forced_tools(fields: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, ...]:
    """Read the tool choice of any wire. Return the names of the tools of which one must be called.

    Raises:
        GatewayError: the choice is unknown, or names a tool that the request does not have.
    """
    kind, known = fields.get("type"), [tool.name for tool in tools]
    if kind == "allowed_tools":
        fields = {**fields, **fields.get("allowed_tools", {})}
        kind = fields.get("mode")
        names = [str(tool.get("name") or tool["function"]["name"]) for tool in fields["tools"]]
    elif kind in _NAMED:
        kind, names = "required", [str(fields.get("name") or fields["function"]["name"])]
    else:
        names = known
    if kind in _NOT_FORCED:
        return ()
    if kind not in _FORCED:
        raise GatewayError(f"tool_choice {fields!s:.80} is not served here; known: auto, none, required, a function")
    if not names:
        raise GatewayError("tool_choice asks for a call, and the request has no tools")
    if unknown := sorted(set(names) - set(known)):
        raise GatewayError(f"tool_choice names {unknown[0]!r}, which is no tool of the request: {', '.join(known)}")
    return tuple(dict.fromkeys(names))
