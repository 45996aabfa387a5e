"""Anthropic's `/v1/messages`, and the request of `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from penstock.gateway.dialect import Dialect, dumps, event, listed, text_of
from penstock.gateway.messages import (
    UNKNOWN_THREAD,
    Answer,
    ChatMessage,
    ChatRequest,
    GatewayError,
    Tool,
    ToolCall,
    bare,
    minted_in,
)

_STOPS = {"stop": "end_turn", "tool_calls": "tool_use"} | dict.fromkeys(("length", "abort", "repetition"), "max_tokens")
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


class AnthropicDialect(Dialect):
    """Messages with blocks: text, thinking, tool_use and tool_result."""

    limits = ("max_tokens",)
    stop = "stop_sequences"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        thread: dict[str, Any] = body.get("thread") or {}
        previous = bare(str(thread.get("previous_message_id") or ""))
        return replace(super().read(body), previous=previous, thread=thread.get("type") == "continue")

    def messages(self, body: Mapping[str, Any]) -> Iterable[ChatMessage]:
        if text := text_of(body.get("system")):
            yield ChatMessage("system", text)
        for given in listed(body["messages"], "messages"):
            yield from _messages(given)

    def tools(self, given: Iterable[Mapping[str, Any]]) -> Iterable[Tool]:
        return map(_tool, given)

    def write(self, answer: Answer) -> dict[str, Any]:
        return {**_head(answer), "content": _blocks(answer), "stop_reason": _STOPS[answer.finish]}

    def events(self, answer: Answer) -> Iterator[bytes]:
        head = _head(answer)
        head["usage"] = {**head["usage"], "output_tokens": 0}
        yield event("message_start", {"type": "message_start", "message": {**head, "content": [], "stop_reason": None}})
        for index, block in enumerate(_blocks(answer)):
            begun, deltas = _deltas(block)
            start = {"type": "content_block_start", "index": index, "content_block": begun}
            yield event("content_block_start", start)
            for delta in deltas:
                data = {"type": "content_block_delta", "index": index, "delta": delta}
                yield event("content_block_delta", data)
            yield event("content_block_stop", {"type": "content_block_stop", "index": index})
        end = {"stop_reason": _STOPS[answer.finish], "stop_sequence": None}
        usage = {"output_tokens": answer.output_tokens}
        yield event("message_delta", {"type": "message_delta", "delta": end, "usage": usage})
        yield event("message_stop", {"type": "message_stop"})

    def error(self, error: GatewayError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status < 500 else "api_error"  # noqa: PLR2004
        fields: dict[str, Any] = {"type": _ERRORS.get(error.status, kind), "message": str(error), "code": error.code}
        if error.code == UNKNOWN_THREAD:  # makes the client send the whole conversation
            fields["details"] = {"error_code": error.code}
        return {"type": "error", "error": fields}


def _messages(given: Mapping[str, Any]) -> list[ChatMessage]:
    """Read one message. It may hold several tool results and a text after them."""
    role, content = given["role"], given["content"]
    blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        return [_assistant(blocks)]
    if role not in {"user", "system"}:
        raise GatewayError(f"unknown role {role!r}; known: user, assistant, system")
    found: list[ChatMessage] = []
    texts: list[Any] = []
    for block in blocks:
        if block["type"] != "tool_result":
            texts.append(block)
            continue
        found.append(ChatMessage("tool", text_of(block.get("content")), call_id=bare(str(block["tool_use_id"]))))
    if texts or not found:
        found.append(ChatMessage("system" if role == "system" else "user", text_of(texts)))
    return found


def _assistant(blocks: list[Any]) -> ChatMessage:
    texts = [block for block in blocks if block["type"] == "text"]
    thoughts = [block for block in blocks if block["type"] == "thinking"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    known = {"text", "thinking", "redacted_thinking", "tool_use"}
    if other := [block["type"] for block in blocks if block["type"] not in known]:
        raise GatewayError(f"unknown blocks {other} of an assistant; known: {', '.join(sorted(known))}")
    calls = tuple(
        ToolCall(bare(str(use["id"])), str(use["name"]), json.dumps(use.get("input") or {}, ensure_ascii=False))
        for use in uses
    )
    text = text_of(texts)
    signed = [bare(str(block.get("signature") or "")) for block in thoughts]
    reasoning = "\n".join(str(block.get("thinking") or "") for block in thoughts) if thoughts else None
    minted = (*signed, *minted_in(text), *(call.id for call in calls))
    return ChatMessage("assistant", text, reasoning, calls, minted=minted)


def _tool(given: Mapping[str, Any]) -> Tool:
    if "input_schema" not in given:
        raise GatewayError(f"tools that the server runs are not served here: {given.get('type') or given.get('name')}")
    return Tool(str(given["name"]), str(given.get("description") or ""), dict(given["input_schema"]))


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.request.model,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens},
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": f"sig_{answer.id}"})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    blocks += [
        {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": call.parsed()}
        for call in message.calls
    ]
    return blocks or [{"type": "text", "text": ""}]


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it starts, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [*deltas, signature]
    written = dumps(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]
