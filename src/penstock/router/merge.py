"""What several processes of one router say, as one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.router.figures import PREFIX

_SUMMED = ("held", "held_bytes", "sessions", "requests", "moved_sessions")
_SUMMED_BY_KEY = ("held_by", "placements")
_SAME = ("epoch", "gate_closed", "gates_closed", "policy")
"""What the owner has told each of them; they differ while one of them has not been told yet."""
_ENGINE_SUMMED = (
    "outstanding",
    "outstanding_tokens",
    "resident_tokens",
    "sessions",
    "requests",
    "breaker_openings",
    "dead_answers",
)
_ENGINE_GREATEST = ("down", "gate_closed", "kv_usage", "kv_capacity", "failure")
_GREATEST = {f"{PREFIX}gate_closed"} | {
    f"{PREFIX}engine_{name}"
    for name in ("eligible", "draining", "gate_closed", "down", "kv_cache_usage", "kv_cache_capacity_tokens")
}
"""Metrics that say the same of every process; all others are counts of its own."""


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of `report.state`, at least one, to one. Engines are those of the process that was told last.

    A session counts in each process that had a turn of it. A gate is closed, and an engine down, if it is for one.
    """
    merged = dict(max(states, key=lambda state: state["epoch"]))
    merged["workers"] = [pid for state in states for pid in state["workers"]]
    merged["in_step"] = all(state[name] == states[0][name] for state in states for name in _SAME)
    merged["gate_closed"] = any(state["gate_closed"] for state in states)
    merged["gates_closed"] = sorted({adapter for state in states for adapter in state["gates_closed"]})
    for name in _SUMMED:
        merged[name] = sum(state[name] for state in states)
    for name in _SUMMED_BY_KEY:
        keys = dict.fromkeys(key for state in states for key in state[name])
        merged[name] = {key: sum(state[name].get(key, 0) for state in states) for key in keys}
    of_engine: dict[str, list[Mapping[str, Any]]] = {}
    for engine in (engine for state in states for engine in state["engines"]):
        of_engine.setdefault(engine["name"], []).append(engine)
    merged["engines"] = [_merge_engine(engine, of_engine[engine["name"]]) for engine in merged["engines"]]
    return merged


def _merge_engine(engine: Mapping[str, Any], of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(engine)
    merged["drained"] = all(engine["drained"] for engine in of)
    for name in _ENGINE_SUMMED:
        merged[name] = sum(engine[name] for engine in of)
    for name in _ENGINE_GREATEST:
        merged[name] = max(engine[name] for engine in of)
    return merged


def merge_metrics(texts: Sequence[str]) -> str:
    """Prometheus texts of several processes to one: summed, or the greatest of what each knows as a whole."""
    families: dict[str, dict[str, float]] = {}
    family: dict[str, float] = {}
    greatest = False
    for line in (line for text in texts for line in text.splitlines()):
        if line.startswith("# TYPE "):
            continue  # it follows the line of its HELP
        if line.startswith("# HELP "):
            family = families.setdefault(line, {})
            greatest = line.split(" ", 3)[2] in _GREATEST
            continue
        sample, _, value = line.rpartition(" ")
        before = family.get(sample)
        family[sample] = float(value) if before is None else (max if greatest else _add)(before, float(value))
    types = {line.split(" ", 3)[2]: line for text in texts for line in text.splitlines() if line.startswith("# TYPE ")}
    lines: list[str] = []
    for head, samples in families.items():
        lines += [head, types[head.split(" ", 3)[2]]]
        lines += [f"{sample} {value:.12g}" for sample, value in samples.items()]
    return "\n".join(lines) + "\n"


def _add(one: float, other: float) -> float:
    return one + other
