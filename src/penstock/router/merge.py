"""What several workers of one router say of themselves, as one router would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.router.prometheus import Family, Sample

_SUMMED = ("held", "held_bytes", "requests", "moved_sessions")
_SUMMED_BY_KEY = ("held_by", "placements")
_ENGINE_SUMMED = ("requests",)
_ENGINE_GREATEST = ("down", "breaker_openings")
"""Each worker tells the others that an engine is down: one event, which all of them count."""


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Answers of `report.state`, at least one, to one: what each worker counts for itself is summed.

    The rest (membership, gates, sessions, what is in flight on each engine) is the same in all of them. An engine is
    down where it is for any of them.
    """
    merged = dict(states[0])
    merged["workers"] = [pid for state in states for pid in state["workers"]]
    for name in _SUMMED:
        merged[name] = sum(state[name] for state in states)
    for name in _SUMMED_BY_KEY:
        keys = dict.fromkeys(key for state in states for key in state[name])
        merged[name] = {key: sum(state[name].get(key, 0) for state in states) for key in keys}
    merged["engines"] = [_merge_engine(of) for of in zip(*(state["engines"] for state in states), strict=True)]
    return merged


def _merge_engine(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(of[0])
    for name in _ENGINE_SUMMED:
        merged[name] = sum(engine[name] for engine in of)
    for name in _ENGINE_GREATEST:
        merged[name] = max(engine[name] for engine in of)
    return merged


def merge_families(reports: Sequence[Sequence[Family]]) -> list[Family]:
    """Figures of several workers to one set: summed, or the greatest of what every worker knows: one may be late."""
    merged: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for report in reports:
        for family in report:
            merged.setdefault(family.name, family)
            of_family = values.setdefault(family.name, {})
            for labels, value, suffix in family.samples:
                key = (suffix, tuple(labels.items()))
                before = of_family.get(key, 0.0)
                of_family[key] = max(before, value) if family.shared else before + value
    return [
        family._replace(samples=[Sample(dict(labels), v, suffix) for (suffix, labels), v in values[name].items()])
        for name, family in merged.items()
    ]


def to_plain(families: Sequence[Family]) -> list[Any]:
    """For a JSON frame."""
    return [[*family._replace(samples=[list(sample) for sample in family.samples])] for family in families]  # pyright: ignore[reportArgumentType]


def from_plain(report: Sequence[Any]) -> list[Family]:
    """The inverse of `to_plain`."""
    return [
        Family(name, kind, what, [Sample(*sample) for sample in samples], shared)
        for name, kind, what, samples, shared in report
    ]
