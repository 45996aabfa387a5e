"""What the router reports of itself: the state of one process, and of several as one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.router.state import EngineLoad, RouterState

if TYPE_CHECKING:
    from penstock.router.backend import Backend
    from penstock.router.dispatcher import Dispatcher

_FIGURES = (
    "name", "weight_version", "down", "outstanding", "requests", "outstanding_tokens", "resident_tokens", "sessions",
    "kv_usage", "kv_capacity", "breaker_openings", "dead_answers", "failure",
)  # fmt: skip
"""Attributes of `Backend` that its state shows."""
_SUMMED = ("held", "held_bytes", "sessions", "requests", "moved_sessions")
_ENGINE_SUMMED = (
    "outstanding", "outstanding_tokens", "resident_tokens", "sessions", "requests", "breaker_openings", "dead_answers",
)  # fmt: skip
_ENGINE_GREATEST = ("down", "kv_usage", "kv_capacity", "failure")


def state_of(dispatcher: Dispatcher) -> RouterState:
    """Return the answer to `GET /router/engines`."""
    gate, placement = dispatcher.gate, dispatcher.placement
    return RouterState(
        epoch=dispatcher.membership.epoch,
        gate_closed=gate.closed,
        held=len(gate),
        held_bytes=gate.held_bytes,
        held_by=gate.held_by(),
        requests=dispatcher.metrics.requests,
        sessions=len(placement.sessions),
        moved_sessions=placement.turns["moved"],
        placements=dict(placement.rules),
        policy=placement.config.model_dump(include={"policy", "prefix_length", "overload_threshold"}),
        workers=(os.getpid(),),
        counted_since=dispatcher.metrics.since,
        engines=tuple(_load_of(backend) for backend in dispatcher.backends.values()),
    )


def _load_of(backend: Backend) -> EngineLoad:
    drained = backend.entry.draining and not backend.outstanding and not backend.sessions
    return EngineLoad(
        **{name: getattr(backend.entry, name) for name in ("url", "eligible", "draining", "dp_rank")},
        **{name: getattr(backend, name) for name in _FIGURES},
        drained=drained,
    )


def merged(states: Sequence[RouterState]) -> RouterState:
    """Merge the states of at least one process. Engines are those of the newest epoch.

    A session counts in each process that served it. The gate is closed, or an engine down, if one process says so.
    """
    newest = max(states, key=lambda state: state.epoch)
    engines = [engine for state in states for engine in state.engines]
    return replace(
        newest,
        workers=tuple(pid for state in states for pid in state.workers),
        counted_since=max(state.counted_since for state in states),
        in_step=all(state.epoch == newest.epoch for state in states),
        gate_closed=any(state.gate_closed for state in states),
        held_by=_total(state.held_by for state in states),
        placements=_total(state.placements for state in states),
        engines=tuple(_merged(load, [one for one in engines if one.name == load.name]) for load in newest.engines),
        **{name: sum(getattr(state, name) for state in states) for name in _SUMMED},
    )


def _total(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def _merged(load: EngineLoad, of: Sequence[EngineLoad]) -> EngineLoad:
    figures: dict[str, Any] = {name: sum(getattr(one, name) for one in of) for name in _ENGINE_SUMMED}
    figures |= {name: max(getattr(one, name) for one in of) for name in _ENGINE_GREATEST}
    return replace(load, drained=all(one.drained for one in of), **figures)
