"""Calls to the router itself that no walk makes: its state, a choice of an engine, the end of a session."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from penstock.router.admin import DATA_PATHS, Strict, Text, parse
from penstock.router.backend import Backend
from penstock.router.dispatcher import Dispatcher
from penstock.router.http import RefusalError
from penstock.router.membership import Engine
from penstock.router.policies import Hints
from penstock.router.state import EngineLoad, RouterState

_METHODS = {
    "/": "GET",
    "/router/health": "GET",
    "/router/engines": "GET or PUT",
    "/router/choose": "POST",
    "/router/sessions/finish": "POST",
    "/router/metrics": "GET",
    "/metrics": "GET",
}
_SERVED = {
    "service": "penstock router",
    "data": sorted(path.decode() for path in DATA_PATHS),
    "router": sorted(path for path in _METHODS if path != "/"),
}
"""The answer to `GET /`. The router also serves the paths that `data_paths` adds."""
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


class _ChoiceBody(Strict):
    prompt_tokens: int = Field(default=0, ge=0)
    prefix_hashes: Text | None = None


class _SessionBody(Strict):
    session_id: Text


def answer(dispatcher: Dispatcher, method: str, path: str, body: bytes) -> Any:
    """Run one call and return its answer. RefusalError: 400, 404 or 405, as `admin.AdminCall` has it."""
    match method, path:
        case "GET", "/":
            return _SERVED
        case "GET", "/router/engines":
            return state_of(dispatcher)
        case "POST", "/router/choose":
            return {"engine": _choose(dispatcher, parse(_ChoiceBody, body))}
        case "POST", "/router/sessions/finish":
            return {"finished": dispatcher.finish_session(parse(_SessionBody, body).session_id)}
        case _ if path not in _METHODS:
            raise RefusalError(404, "not_found", f"no such endpoint: {path[:200]}")
        case _:
            what = f"{method} does not go with {path}, which takes {_METHODS[path]}"
            raise RefusalError(405, "method_not_allowed", what)


def _choose(dispatcher: Dispatcher, asked: _ChoiceBody) -> str | None:
    """Return an engine for a request past the router; None: it would have to wait.

    The choice counts for the next one. The load does not count, since the router would not see its end.
    """
    hashes = None if asked.prefix_hashes is None else asked.prefix_hashes.encode()
    if dispatcher.gate.closed:
        return None
    hints, now = Hints(prompt_tokens=asked.prompt_tokens, prefix_hashes=hashes), time.monotonic()
    engine = dispatcher.placement.place(hints, now)
    if not isinstance(engine, Engine):
        return None
    dispatcher.placement.done(hints, engine, now)
    return engine.name


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
