"""A stream that was taken up again tells everything from the start: this passes on only what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


class Seam:
    """Counts what of each part of each choice went on, in characters and list entries.

    The engine that goes on has the state of the one before it, so its text begins with the text that was passed on.
    Chunks are cut elsewhere, and random ids (the answer's, those of tool calls) are others: the first ones stay.
    """

    def __init__(self) -> None:
        self.passed_on = False
        """A caller has seen something."""
        self._over = False
        """The one event without choices, usage, went on: behind it nothing is new."""
        self._head: dict[str, Any] = {}
        self._passed: dict[tuple[Any, ...], int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    def again(self) -> None:
        """The stream begins anew."""
        self._seen.clear()

    def new(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """What of an event its reader has not seen; None where that is nothing."""
        if not self._head:
            self._head = {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        parts = [self._choice(choice) for choice in choices]
        new = [part for part in parts if part is not None]
        if not (new if choices else not self._over):
            return None
        self._over = not choices
        self.passed_on = True
        return {**chunk, **self._head, "choices": new}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        before = sum(self._passed.values())
        first = not any(key[0] == choice["index"] for key in self._passed)
        index = choice["index"]
        part = {key: self._part((index, key), value) for key, value in choice.items() if key != "index"}
        return {"index": index, **part} if first or sum(self._passed.values()) > before else None

    def _part(self, key: tuple[Any, ...], value: Any) -> Any:
        """The part of `value` that lies beyond what was passed on under `key`."""
        name = key[-1]
        if name == "tool_calls" and isinstance(value, list):
            calls = cast("list[dict[str, Any]]", value)
            return [
                {"index": call.get("index", 0)}
                | {k: self._part((*key, call.get("index", 0), k), v) for k, v in call.items() if k != "index"}
                for call in calls
            ]
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            return {k: self._part((*key, k), v) for k, v in fields.items()}
        if name in _ONCE and value is not None:
            return value if self._advance(key, 1) == 0 else None
        if isinstance(value, (str, list)):
            whole = cast("str | list[Any]", value)
            return whole[self._advance(key, len(whole)) :]
        return value

    def _advance(self, key: tuple[Any, ...], length: int) -> int:
        """Count `length` more under `key`; returns how many of them were passed on before."""
        start = self._seen.get(key, 0)
        if key[-1] in _ONCE:
            start = 0
        passed = self._passed.get(key, 0)
        self._seen[key] = start + length
        self._passed[key] = max(passed, start + length)
        return min(max(0, passed - start), length)


_ONCE = frozenset({"role", "id", "type", "name", "finish_reason", "stop_reason"})
"""What comes once for a choice or a tool call, and is no text in parts."""
