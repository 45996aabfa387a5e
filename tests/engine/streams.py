"""OpenAI answers and streams of an engine, as tests compare them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is random."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


async def joined(chunks: AsyncIterator[dict[str, Any]]) -> dict[Any, Any]:
    """A stream's chunks as one: for each choice its text, ids, logprobs, end and versions; and the usage."""
    choices: dict[Any, Any] = {}
    ids = set[tuple[Any, Any]]()
    async for chunk in chunks:
        ids.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            got = choices.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "roles": []})
            delta = choice.get("delta", choice)
            got["text"] += delta.get("text") or delta.get("content") or ""
            got["roles"] += [delta["role"]] if delta.get("role") else []
            got["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            got["logprobs"] += logprobs.get("token_logprobs") or [e["logprob"] for e in logprobs.get("content") or ()]
            if choice.get("finish_reason"):
                assert "finish" not in got, "a choice ended twice"
                got |= {"finish": choice["finish_reason"], "versions": choice["weight_versions"]}
        choices |= {"usage": chunk["usage"]} if chunk.get("usage") else {}
    assert len(ids) == 1, "a stream has one id"
    return choices
