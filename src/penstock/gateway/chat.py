"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.gateway.dialect import Dialect, event, listed, text_of
from penstock.gateway.messages import Answer, ChatMessage, ChatRequest, GatewayError, Tool, ToolCall, bare, minted_in


class ChatDialect(Dialect):
    """Chat completions, with `reasoning_content` as in vLLM."""

    limits = ("max_completion_tokens", "max_tokens")

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        if body.get("n") not in (None, 1):
            why = f"one choice a turn is served here, got n={body['n']!r}; send the request again for another"
            raise GatewayError(why)
        streamed: dict[str, Any] = body.get("stream_options") or {}
        return replace(super().read(body), include_usage=bool(streamed.get("include_usage")))

    def messages(self, body: Mapping[str, Any]) -> Iterable[ChatMessage]:
        return map(_message, listed(body["messages"], "messages"))

    def tools(self, given: Iterable[Mapping[str, Any]]) -> Iterable[Tool]:
        return map(_tool, given)

    def write(self, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "message": _written(answer), "logprobs": None, "finish_reason": _finish(answer)}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        head = _head(answer, "chat.completion.chunk")
        message = _written(answer)
        calls = message.pop("tool_calls", [])
        for i, call in enumerate(calls):
            call["index"] = i
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [call]} for call in calls]
        for delta in deltas:
            yield event(None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event(None, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(answer)}]})
        if answer.request.include_usage:
            yield event(None, {**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error_event(self, error: GatewayError) -> bytes:
        """Write an error as the last event. No `[DONE]` follows it."""
        return event(None, self.error(error))


def _message(given: Mapping[str, Any]) -> ChatMessage:
    role, text = given["role"], text_of(given.get("content"))
    if role == "tool":
        return ChatMessage("tool", text, call_id=bare(str(given["tool_call_id"])), name=str(given.get("name") or ""))
    if role in {"system", "developer"}:
        return ChatMessage("system", text)
    if role == "user":
        return ChatMessage("user", text)
    if role != "assistant":
        raise GatewayError(f"unknown role {role!r}; known: system, developer, user, assistant, tool")
    calls = tuple(
        ToolCall(bare(str(call["id"])), str(call["function"]["name"]), _arguments(call["function"].get("arguments")))
        for call in given.get("tool_calls") or ()
    )
    reasoning = given.get("reasoning_content", given.get("reasoning"))
    minted = (*minted_in(text), *(call.id for call in calls))
    return ChatMessage("assistant", text, None if reasoning is None else str(reasoning), calls, minted=minted)


def _arguments(given: Any) -> str:
    if given is None or isinstance(given, str):
        return given or "{}"
    raise GatewayError(f"the arguments of a tool call are JSON text, got {str(given)[:80]}")


def _tool(given: Mapping[str, Any]) -> Tool:
    if given.get("type", "function") != "function":
        raise GatewayError(f"tools are functions here, got type {given.get('type')!r}")
    function = given["function"]
    return Tool(str(function["name"]), str(function.get("description") or ""), dict(function.get("parameters") or {}))


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": answer.created,
        "model": answer.request.model,
        "system_fingerprint": None,
    }


def _written(answer: Answer) -> dict[str, Any]:
    message = answer.message
    written: dict[str, Any] = {"role": "assistant", "content": message.text or None, "refusal": None}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [
            {"id": f"call_{c.id}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return written


def _finish(answer: Answer) -> str:
    return "length" if answer.finish in {"abort", "repetition"} else answer.finish


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.output_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": total,
    }
