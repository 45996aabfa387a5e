"""Complaint 6: one cannot train on the harness that ships; what is trained is a copy of it.

harbor #1922, NeMo Gym #1824, trl #5974, verl #5790, SkyRL #1959. The requests have the form of Codex CLI 0.169 and
Claude Code 2.1, as seen by a loopback server; the real programs are not run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent_rig import Rig

from chat_model import chat_tokenizer
from gateway_rig import KEY, events_of

SHELL = '<think>\nlook\n</think>\n\n<tool_call>\n{"name": "shell", "arguments": {"command":  ["ls"]}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'


async def test_codex_s_session_over_responses(tmp_path: Path) -> None:
    """Streams alone, its session in a header, reasoning sent back, a tool with text, two calls in turn."""
    rig = Rig(chat_tokenizer(tmp_path))
    rig.engine.texts = [SHELL, PATCH, "All done."]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
    ]
    tools = [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search"},
    ]
    headers = {"session-id": "abc", "thread-id": "abc", "x-codex-window-id": "abc:0"}
    body = {"model": "m", "instructions": "You are Codex", "tools": tools, "tool_choice": "auto", "store": False}
    more = {"stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "abc"}
    kinds: list[list[str]] = []
    for _ in range(3):
        answer = await rig.http.post("/v1/responses", json={**body, **more, "input": items}, headers=headers)
        assert answer.status_code == 200, answer.text
        events = events_of(answer.text)
        assert events[-1]["type"] == "response.completed"
        output = events[-1]["response"]["output"]
        kinds.append([item["type"] for item in output])
        for item in output:
            items.append({name: value for name, value in item.items() if name not in {"status", "content"}}
                         if item["type"] == "reasoning" else item)  # fmt: skip
            if item["type"].endswith("call"):
                items.append({"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"})
    assert kinds == [["reasoning", "function_call"], ["custom_tool_call"], ["message"]]
    (row,) = await rig.rows("abc")
    assert [node["cause"] for node in row["nodes"]] == ["", "", ""]


async def test_claude_code_s_session_over_messages(tmp_path: Path) -> None:
    """Blocks everywhere, a beta query, thinking with its signature, a count of tokens, a retry, a sub-agent."""
    rig = Rig(chat_tokenizer(tmp_path))
    rig.engine.texts = [SHELL, "title", "All done."]
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 500,
        "system": [{"type": "text", "text": "You are Claude Code", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"},
                                         {"type": "text", "text": "fix it", **cached}]},
        ],
        "tools": [{"name": "shell", "description": "runs", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 100},
        "metadata": {"user_id": "u"},
        "stream": True,
    }  # fmt: skip
    headers = {"X-Claude-Code-Session-Id": "cc", "anthropic-version": "2023-06-01", "x-stainless-retry-count": "0"}
    headers |= {"x-api-key": KEY}
    counted = await rig.post("/v1/messages/count_tokens?beta=true", {**body, "stream": False}, **headers)

    async def ask(sent: dict[str, Any], retry: str = "0") -> list[dict[str, Any]]:
        more = {**headers, "x-stainless-retry-count": retry}
        answer = await rig.http.post("/v1/messages?beta=true", json=sent, headers=more)
        events = events_of(answer.text)
        assert events[-1]["type"] == "message_stop"
        assert events[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"] or sent is not body
        return events

    first = await ask(body)
    assert await ask(body, retry="1") == first
    blocks: list[dict[str, Any]] = [event["content_block"] for event in first if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in first if event["type"] == "content_block_delta"]
    blocks[0] |= {"thinking": deltas[0]["thinking"], "signature": deltas[1]["signature"]}
    blocks[1]["input"] = json.loads(deltas[2]["partial_json"])
    await ask({**body, "system": "Make a title", "tools": [], "messages": [{"role": "user", "content": "fix it"}]})
    result = {"type": "tool_result", "tool_use_id": blocks[1]["id"], "is_error": False}
    result |= {"content": [{"type": "text", "text": "file.py"}], **cached}
    messages = [*body["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    await ask({**body, "messages": messages})
    rows = await rig.rows("cc")
    assert sorted(len(row["nodes"]) for row in rows) == [1, 2]
    assert len(rig.engine.seen) == 3
