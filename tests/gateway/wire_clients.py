"""The three wires as a harness uses them: ask, and put the answer and a tool's result behind the conversation.

`echo` says what a harness does to the answer before it sends it back, as seen of nine real ones.
"""

from __future__ import annotations

import json
from typing import Any

from gateway_rig import PARAMETERS, Rig, events_of

ECHOES = ("identical", "compact", "no reasoning")


class Chat:
    path = "/v1/chat/completions"

    def __init__(self, rig: Rig, *, stream: bool = False) -> None:
        self.rig = rig
        self.stream = stream
        self.items: list[dict[str, Any]] = [{"role": "system", "content": "be good"}]
        self.function = {"name": "add", "description": "adds", "parameters": PARAMETERS}
        self.headers: dict[str, str] = {}
        self.more: dict[str, Any] = {}
        """Further fields of requests."""

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    @property
    def body(self) -> dict[str, Any]:
        return {"model": "m", "messages": self.items, "tools": [{"type": "function", "function": self.function}]}

    async def ask(self) -> dict[str, Any]:
        if not self.stream:
            answer = await self.rig.post(self.path, {**self.body, **self.more}, **self.headers)
            return answer["choices"][0]["message"]
        answer = await self.rig.http.post(self.path, json={**self.body, "stream": True}, headers=self.headers)
        assert answer.text.endswith("data: [DONE]\n\n")
        message: dict[str, Any] = {}
        for event in events_of(answer.text):
            for name, value in event["choices"][0]["delta"].items():
                message[name] = message.get(name, type(value)()) + value if name != "role" else value
        for call in message.get("tool_calls", ()):
            del call["index"]
        return message

    def echo(self, message: dict[str, Any], how: str = "identical", result: str = "5") -> None:
        message = json.loads(json.dumps(message))
        if how != "identical":
            message.pop("reasoning_content", None)
        calls = message.get("tool_calls", [])
        for call in calls if how == "compact" else ():
            given = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(given, separators=(",", ":"))
        self.items.append(message)
        self.items += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]

    @staticmethod
    def seen(message: dict[str, Any]) -> tuple[str, str | None, list[Any]]:
        calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        return message.get("content") or "", message.get("reasoning_content"), calls


class Responses(Chat):
    path = "/v1/responses"

    def __init__(self, rig: Rig, *, stream: bool = False) -> None:
        super().__init__(rig, stream=stream)
        self.items = []

    @property
    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", **self.function}, {"type": "web_search"}]
        return {"model": "m", "instructions": "be good", "input": self.items, "tools": tools, "store": False}

    async def ask(self) -> dict[str, Any]:
        if not self.stream:
            return await self.rig.post(self.path, {**self.body, **self.more}, **self.headers)
        answer = await self.rig.http.post(self.path, json={**self.body, "stream": True}, headers=self.headers)
        events = events_of(answer.text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"] == done
        return events[-1]["response"]

    def echo(self, message: dict[str, Any], how: str = "identical", result: str = "5") -> None:
        output = json.loads(json.dumps(message["output"]))
        calls = [item for item in output if item["type"] == "function_call"]
        for item in calls if how == "compact" else ():
            item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
        self.items += [item for item in output if item["type"] != "reasoning" or how != "no reasoning"]
        self.items += [{"type": "function_call_output", "call_id": call["call_id"], "output": result} for call in calls]

    @staticmethod
    def seen(message: dict[str, Any]) -> tuple[str, str | None, list[Any]]:
        output = message["output"]
        text = "".join(item["content"][0]["text"] for item in output if item["type"] == "message")
        thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
        calls = [json.loads(item["arguments"]) for item in output if item["type"] == "function_call"]
        return text, thoughts[0] if thoughts else None, calls


class Anthropic(Chat):
    path = "/v1/messages"

    def __init__(self, rig: Rig, *, stream: bool = False) -> None:
        super().__init__(rig, stream=stream)
        self.items = []

    @property
    def body(self) -> dict[str, Any]:
        function = {("input_schema" if name == "parameters" else name): value for name, value in self.function.items()}
        return {"model": "m", "max_tokens": 500, "system": "be good", "messages": self.items, "tools": [function]}

    async def ask(self) -> dict[str, Any]:
        if not self.stream:
            return await self.rig.post(self.path, {**self.body, **self.more}, **self.headers)
        answer = await self.rig.http.post(self.path, json={**self.body, "stream": True}, headers=self.headers)
        events = events_of(answer.text)
        assert events[-1] == {"type": "message_stop"}
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    blocks[-1]["input"] = json.loads(delta["partial_json"])
                else:
                    name = delta["type"].removesuffix("_delta")
                    blocks[-1][name] += delta[name]
        return {"content": blocks}

    def echo(self, message: dict[str, Any], how: str = "identical", result: str = "5") -> None:
        blocks = [b for b in message["content"] if b["type"] != "thinking" or how != "no reasoning"]
        self.items.append({"role": "assistant", "content": json.loads(json.dumps(blocks))})
        uses = [b for b in blocks if b["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": result} for use in uses]
        if results:
            self.items.append({"role": "user", "content": results})

    @staticmethod
    def seen(message: dict[str, Any]) -> tuple[str, str | None, list[Any]]:
        blocks = message["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        return text, thoughts[0] if thoughts else None, [b["input"] for b in blocks if b["type"] == "tool_use"]


WIRES = (Chat, Responses, Anthropic)
