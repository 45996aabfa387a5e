"""An engine that says what a test tells it, a gateway over it, and the check that rows are what the engine saw."""

from __future__ import annotations

import asyncio
import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from penstock.gateway.app import build_app
from penstock.gateway.graph import Limits
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.tokenizer import Tokenizer
from penstock.types import Sample, SamplingParams, VersionSpan

KEY, OTHER_KEY = "key-of-a-tenant", "key-of-another"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1,"b": [2, 3]}}\n</tool_call>'
"""With white space that no JSON library writes."""
THOUGHT = "<think>\nlet me see\n</think>\n\n"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}


def logprob(context: Sequence[int]) -> float:
    """Logprob of the last token of a context; it depends on every token before it."""
    return -(1 + zlib.crc32(array("q", context).tobytes()) % 999_983) / 1e6


@dataclass
class Engine:
    """Says the texts in their order, then `done`. The version of a token is the number of its request."""

    tokenizer: Tokenizer
    texts: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    """Said before the texts."""
    seen: list[list[int]] = field(default_factory=list)
    made: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """The first request came."""
    hold: asyncio.Event | None = None
    error: Exception | None = None

    async def sample(self, ids: Sequence[int], n: int, params: SamplingParams, session_id: Any = None) -> list[Sample]:
        assert n == 1
        version = len(self.seen)
        self.seen.append(list(ids))
        self.asked.set()
        self.params.append(params)
        self.sessions.append(session_id)
        said = self.ids.pop(0) if self.ids else self.tokenizer.encode_exact(self.texts.pop(0) if self.texts else "done")
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        made = [*said, 2]
        finish = "stop" if len(made) <= params.max_tokens else "length"
        made = made[: params.max_tokens]
        self.made.append(made)
        logprobs = tuple(logprob([*ids, *made[: i + 1]]) for i in range(len(made)))
        return [Sample(tuple(made), finish, logprobs, (VersionSpan(version, 0, len(made)),))]


class Rig:
    """A gateway over a scripted engine, and a client of it."""

    def __init__(self, tokenizer: Tokenizer, *, keepalive_s: float = 10.0, **options: Any) -> None:
        self.engine = Engine(tokenizer)
        self.tokenizer = tokenizer
        tenants = [Tenant("a", KEY, options.pop("limits", Limits())), Tenant("b", OTHER_KEY)]
        self.tenant = tenants[0]
        self.gateway = Gateway(
            self.engine, ChatTemplate(tokenizer), GatewayOptions("m", **{"max_model_len": 4096, **options}), tenants
        )
        transport = httpx.ASGITransport(build_app(self.gateway, keepalive_s=keepalive_s))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=auth(KEY))

    def session(self, name: str = "default") -> Any:
        return self.gateway.find(self.gateway.tenant_of(KEY), name)

    async def post(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        answer = await self.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def rows(self, name: str = "default") -> list[dict[str, Any]]:
        answer = await self.http.get(f"/sessions/{name}/rows")
        rows = [json.loads(line) for line in answer.text.splitlines()]
        self.check(rows)
        return rows

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """Each trained token stands in the context that the engine saw; every sampled token trains once."""
        trained: list[float] = []
        for row in rows:
            ids = [*row["prompt_ids"], *row["response_ids"]]
            start = len(row["prompt_ids"])
            for i, mask in enumerate(row["loss_mask"]):
                assert row["logprobs"][i] == (logprob(ids[: start + i + 1]) if mask else 0.0)
                assert not mask or row["logprobs"][i] != logprob(ids[1 : start + i + 1])
            trained += [p for p, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
            for node in row["nodes"]:
                context = ids[: start + node["end"] - node["tokens"]]
                assert context in self.engine.seen, "a context that no engine saw"
        sampled = sum(node["tokens"] for node in {n["id"]: n for row in rows for n in row["nodes"]}.values())
        assert len(trained) == sampled


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of an answer of any wire."""
    if "choices" in answer:
        found = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls", ())]
        return [(call["name"], json.loads(call["arguments"])) for call in found]
    if "output" in answer:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items]
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
