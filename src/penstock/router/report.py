"""What the router says of itself: the set of engines with its figures, as JSON and for Prometheus."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.router.metrics import PREFIX
from penstock.router.prometheus import Family, Sample

if TYPE_CHECKING:
    from penstock.router.dispatcher import Dispatcher
    from penstock.router.engine import Engine
    from penstock.router.policies.base import EngineView


def state(dispatcher: Dispatcher) -> dict[str, Any]:
    """What `GET /router/engines` answers; `penstock.router.admin_client.RouterState` explains each value."""
    gate, placement = dispatcher.gate, dispatcher.placement
    views = placement.views()
    return {
        "epoch": dispatcher.membership.epoch,
        "gate_closed": gate.closed,
        "gates_closed": sorted(gate.adapters),
        "held": len(gate),
        "held_bytes": gate.held_bytes,
        "held_by": gate.held_by(),
        "requests": dispatcher.metrics.requests,
        "sessions": len(placement.sessions),
        "moved_sessions": placement.statistics.moved,
        "placements": dict(placement.statistics.rules),
        "policy": policy_in_force(dispatcher),
        "workers": [os.getpid()],
        "engines": [_engine(dispatcher, engine, views[engine.name]) for engine in dispatcher.engines.values()],
    }


def policy_in_force(dispatcher: Dispatcher) -> dict[str, Any]:
    """By which policies requests are placed, as `RouterConfig` has it."""
    options = dispatcher.placement.options
    return {
        "policy": ",".join(options.policies),
        "prefix_length": options.prefix_length,
        "overload_threshold": options.overload_threshold,
    }


def _engine(dispatcher: Dispatcher, engine: Engine, view: EngineView) -> dict[str, Any]:
    entry = engine.entry
    client_key, admin_key = dispatcher.keys
    sessions = dispatcher.placement.sessions_on(entry.name)
    return {
        "name": entry.name,
        "url": entry.url,
        "weight_version": entry.weight_version,
        "eligible": entry.eligible,
        "draining": entry.draining,
        "drained": entry.draining and not view.outstanding and not sessions,
        "adapters": entry.adapters,
        "dp_rank": entry.dp_rank,
        "other_key": entry.api_key is not None
        and (entry.api_key == admin_key or client_key not in (None, entry.api_key)),
        "down": engine.down,
        "breaker_openings": engine.openings,
        "dead_answers": engine.dead_answers,
        "failure": engine.failure,
        "gate_closed": entry.name in dispatcher.gate.engines,
        "outstanding": view.outstanding,
        "outstanding_tokens": view.outstanding_tokens,
        "resident_tokens": view.resident_tokens,
        "sessions": sessions,
        "kv_usage": view.kv_usage,
        "kv_capacity": view.kv_capacity,
        "requests": engine.requests,
    }


def families(dispatcher: Dispatcher) -> list[Family]:
    """Every figure for Prometheus."""
    gate, statistics = dispatcher.gate, dispatcher.placement.statistics
    engines = state(dispatcher)["engines"]

    def gauge(name: str, what: str, value: float) -> Family:
        return Family(PREFIX + name, "gauge", what, [Sample({}, value)])

    def of_engines(name: str, what: str, key: str) -> Family:
        kind = "counter" if name.endswith("_total") else "gauge"
        samples = [Sample({"engine": engine["name"]}, float(engine[key])) for engine in engines]
        return Family(f"{PREFIX}engine_{name}", kind, what, samples)

    def counts(name: str, what: str, label: str, values: Mapping[str, int]) -> Family:
        return Family(f"{PREFIX}{name}_total", "counter", what, [Sample({label: k}, n) for k, n in values.items()])

    turns = {kind: getattr(statistics, kind) for kind in ("opened", "stayed", "moved", "rehomed", "single")}
    held = [Sample({"for": kind}, count) for kind, count in gate.held_by().items()]
    return [
        *dispatcher.metrics.families(),
        Family(f"{PREFIX}held", "gauge", "Requests waiting now, by what they wait for.", held),
        gauge("held_bytes", "Most bytes that are kept of requests that wait or are still coming in.", gate.held_bytes),
        gauge("gate_closed", "1 while the gate for all is closed.", gate.closed),
        gauge("sessions", "Sessions known.", len(dispatcher.placement.sessions)),
        counts("placements", "Requests placed, by the policy that chose the engine.", "rule", statistics.rules),
        counts("turns", "Requests placed, by what became of their session.", "session", turns),
        of_engines("outstanding", "Requests sent and not answered in full.", "outstanding"),
        of_engines("outstanding_tokens", "Prompt and expected tokens of those.", "outstanding_tokens"),
        of_engines("resident_tokens", "Context that lives there.", "resident_tokens"),
        of_engines("sessions", "Sessions that live there.", "sessions"),
        of_engines("kv_cache_usage", "Share of its KV cache in use; -1: not known.", "kv_usage"),
        of_engines("kv_cache_capacity_tokens", "Tokens that its KV cache holds; 0: not known.", "kv_capacity"),
        of_engines("requests_total", "Requests sent.", "requests"),
        of_engines("eligible", "1 if the fleet announces it as eligible.", "eligible"),
        of_engines("draining", "1 while it is to leave.", "draining"),
        of_engines("gate_closed", "1 while its own gate is closed.", "gate_closed"),
        of_engines("down", "1 while the breaker is open.", "down"),
        of_engines("breaker_openings_total", "How often the breaker opened.", "breaker_openings"),
        of_engines("dead_answers_total", "Answers that said that its core is dead.", "dead_answers"),
    ]
