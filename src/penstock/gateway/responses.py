"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.gateway.dialect import Dialect, event, listed, text_of
from penstock.gateway.messages import Answer, ChatMessage, ChatRequest, GatewayError, Tool, ToolCall, bare, minted_in

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_RESULTS = ("function_call_output", "custom_tool_call_output")
_SUMMARY = "summary_text"
_REASONING = "reasoning_text"


class ResponsesDialect(Dialect):
    """Items instead of messages. Adjacent items of an assistant form one message."""

    limits = ("max_output_tokens",)

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        previous = bare(str(body.get("previous_response_id") or ""))
        return replace(super().read(body), previous=previous, has_instructions=bool(body.get("instructions")))

    def messages(self, body: Mapping[str, Any]) -> Iterable[ChatMessage]:
        if instructions := body.get("instructions"):
            yield ChatMessage("system", str(instructions))
        given = body["input"]
        yield from _messages([{"role": "user", "content": given}] if isinstance(given, str) else listed(given, "input"))

    def tools(self, given: Iterable[Mapping[str, Any]]) -> Iterable[Tool]:
        """Read the tools. Leave out those that OpenAI's servers run."""
        for tool in given:
            if tool["type"] in {"function", "custom"}:
                is_custom = tool["type"] == "custom"
                parameters = _INPUT if is_custom else dict(tool.get("parameters") or {})
                yield Tool(str(tool["name"]), str(tool.get("description") or ""), parameters, custom=is_custom)

    def write(self, answer: Answer) -> dict[str, Any]:
        whole, items = answer.finish in {"stop", "tool_calls"}, _items(answer)
        items[-1]["status"] = "completed" if whole else "incomplete"
        return {
            **_head(answer, "completed" if whole else "incomplete"),
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": items,
            "usage": _usage(answer),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        finished = self.write(answer)
        begun: dict[str, Any] = {**_head(answer, "in_progress"), "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(finished["output"]):
            events += _item_events(item, index)
        events.append({"type": f"response.{finished['status']}", "response": finished})
        for number, data in enumerate(events):
            yield event(data["type"], {**data, "sequence_number": number})

    def error_event(self, error: GatewayError) -> bytes:
        """Write an error as the last event, which is a failed response."""
        why = {"code": error.code, "message": str(error)}
        failed: dict[str, Any] = {"object": "response", "status": "failed", "error": why, "output": []}
        return event("response.failed", {"type": "response.failed", "response": failed})


def _messages(items: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Read items. An assistant's adjacent items form one message; reasoning after a text starts the next message."""
    messages: list[ChatMessage] = []
    run: list[ChatMessage] = []
    for item in items:
        kind = item.get("type", "message")
        if kind in _RESULTS:
            made = ChatMessage("tool", text_of(item.get("output")), call_id=bare(str(item["call_id"])))
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] in {"system", "developer"} else "user"
            made = ChatMessage(role, text_of(item.get("content")))
        else:
            made = _assistant(kind, item)
            if kind == "reasoning" and run and any(part.text for part in run):
                messages.append(_joined(run))
                run = []
            run.append(made)
            continue
        messages += [*([_joined(run)] if run else []), made]
        run = []
    return [*messages, *([_joined(run)] if run else [])]


def _assistant(kind: str, item: Mapping[str, Any]) -> ChatMessage:
    minted = tuple(bare(str(item[name])) for name in ("id", "call_id", "encrypted_content") if item.get(name))
    if kind == "message":
        text = text_of(item.get("content"))
        return ChatMessage("assistant", text, minted=(*minted, *minted_in(text)))
    if kind == "reasoning":
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        text = text_of(parts, (_REASONING, _SUMMARY)) if parts else None  # the item may come without its content
        return ChatMessage("assistant", reasoning=text, minted=minted)
    if kind == "function_call":
        arguments = str(item.get("arguments") or "{}")
    elif kind == "custom_tool_call":
        arguments = json.dumps({"input": text_of(item.get("input"))}, ensure_ascii=False)
    else:
        raise GatewayError(f"items of type {kind!r} are not served here")
    call = ToolCall(bare(str(item["call_id"])), str(item["name"]), arguments)
    return ChatMessage("assistant", calls=(call,), minted=minted)


def _joined(parts: Sequence[ChatMessage]) -> ChatMessage:
    thoughts = [part.reasoning for part in parts if part.reasoning is not None]
    return ChatMessage(
        "assistant",
        "\n".join(part.text for part in parts if part.text),
        "".join(thoughts) if thoughts else None,
        tuple(call for part in parts for call in part.calls),
        minted=tuple(name for part in parts for name in part.minted),
    )


def _head(answer: Answer, status: str) -> dict[str, Any]:
    request = answer.request
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": request.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": request.sampling.get("temperature"),
        "top_p": request.sampling.get("top_p"),
        "tool_choice": "auto",
        "tools": [],
        "previous_response_id": f"resp_{request.previous}" if request.previous else None,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    message, node = answer.message, answer.id
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        content = [{"type": _REASONING, "text": message.reasoning}]
        reasoning = {"id": f"rs_{node}", "type": "reasoning", "summary": [], "content": content}
        items.append({**reasoning, "encrypted_content": f"sig_{node}", "status": "completed"})
    if message.text or not message.calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{node}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    custom = {tool.name for tool in answer.request.tools if tool.custom}
    items += [_call_item(call, is_custom=call.name in custom) for call in message.calls]
    return items


def _call_item(call: ToolCall, *, is_custom: bool) -> dict[str, Any]:
    item: dict[str, Any] = {"call_id": f"call_{call.id}", "name": call.name, "status": "completed"}
    if not is_custom:
        return {"id": f"fc_{call.id}", "type": "function_call", **item, "arguments": call.arguments}
    return {"id": f"ctc_{call.id}", "type": "custom_tool_call", **item, "input": json.loads(call.arguments)["input"]}


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    empty, name, text = _emptied(item)
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    part: dict[str, Any] | None = item["content"][0] if item["type"] in {"message", "reasoning"} else None
    if part is not None:
        place["content_index"] = 0
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    field = {"response.function_call_arguments": "arguments", "response.custom_tool_call_input": "input"}
    yield {"type": f"{name}.delta", **place, "delta": text}
    yield {"type": f"{name}.done", **place, field.get(name, "text"): text}
    if part is not None:
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _emptied(item: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return an item as it starts, the name of the events that fill it, and its text."""
    kind = item["type"]
    begun = {**item, "status": "in_progress"}
    if kind == "function_call":
        return {**begun, "arguments": ""}, "response.function_call_arguments", item["arguments"]
    if kind == "custom_tool_call":
        return {**begun, "input": ""}, "response.custom_tool_call_input", item["input"]
    name = "response.output_text" if kind == "message" else f"response.{_REASONING}"
    return {**begun, "content": []}, name, item["content"][0]["text"]


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.output_tokens,
    }
