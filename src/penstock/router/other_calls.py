"""Calls to the router itself that no walk makes: its state, a choice of an engine, the end of a session.

Its control port takes them all. The data port takes reads alone, and those of its figures only while it has one
process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.control_server import encoded
from penstock.guard import cross_site
from penstock.rooms import plugged_in
from penstock.router.admin import ANNOUNCE, parse
from penstock.router.backend import Backend
from penstock.router.client_connection import Call, ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.http import RefusalError, RequestHead, response
from penstock.router.membership import POLICY_OPTIONS, Engine
from penstock.router.placement import Share
from penstock.router.policies import Hints
from penstock.router.server import DATA_PATHS, Router
from penstock.router.state import EngineLoad, RouterState

_FIGURES = (
    "name", "weight_version", "down", "outstanding", "requests", "outstanding_tokens", "resident_tokens", "sessions",
    "kv_usage", "kv_capacity", "breaker_openings", "dead_answers", "failure",
)  # fmt: skip
"""Attributes of `Backend` that its state shows."""


class _Body(BaseModel):
    """A body with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Text = Annotated[str, Field(min_length=1, max_length=512)]


class _ChoiceBody(_Body):
    prompt_tokens: int = Field(default=0, ge=0)
    prefix_hashes: _Text | None = None


class _SessionBody(_Body):
    session_id: _Text


def _choose(dispatcher: Dispatcher, asked: _ChoiceBody) -> str | None:
    """Return an engine for a request past the router; None: it would have to wait.

    The choice counts for the next one. The load does not count, since the router would not see its end.
    """
    hashes = None if asked.prefix_hashes is None else asked.prefix_hashes.encode()
    if dispatcher.gate.closed:
        return None
    hints, share, now = Hints(prompt_tokens=asked.prompt_tokens, prefix_hashes=hashes), Share(), time.monotonic()
    engine = dispatcher.placement.place(hints, share, now)
    if not isinstance(engine, Engine):
        return None
    dispatcher.placement.done(hints, share, engine, now)
    return engine.name


def finish_session(dispatcher: Dispatcher, session_id: str) -> bool:
    """Forget a session that has no further turn; return False if it was not known."""
    known: bool = dispatcher.placement.memory.sessions.drop(session_id)
    dispatcher.gate.room()
    return known


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
        sessions=len(placement.memory.sessions),
        moved_sessions=placement.turns["moved"],
        placements=dict(placement.rules),
        policy=placement.config.model_dump(include=POLICY_OPTIONS),
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


def calls() -> dict[str, Callable[[Dispatcher, bytes], Any]]:
    """Return what a control port serves beside announcements."""

    def metrics(dispatcher: Dispatcher, _: bytes) -> str:
        return plugged_in("figures")(dispatcher)

    return {
        "GET /router/engines": lambda dispatcher, _: state_of(dispatcher),
        "POST /router/choose": lambda dispatcher, body: {"engine": _choose(dispatcher, parse(_ChoiceBody, body))},
        "POST /router/sessions/finish": lambda dispatcher, body: {
            "finished": finish_session(dispatcher, parse(_SessionBody, body).session_id)
        },
        "GET /router/metrics": metrics,
        "GET /metrics": metrics,
    }


# --- The data port ---------------------------------------------------------------------------------------------------

_CONTROL = {ANNOUNCE, *calls()}


class OwnCall(Call):
    """A read of the router itself at its data port."""

    def __init__(self, router: Router, client: ClientConnection, request: RequestHead, read: Callable[[], Any]) -> None:
        self._metrics, self._client, self._request, self._read = router.metrics, client, request, read

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:  # noqa: ARG002 - a read needs none
        if done:
            close, head_only = not self._request.keep_alive, self._request.method == b"HEAD"
            content, kind = encoded(self._read())
            answer = response(200, content, content_type=kind, close=close, head_only=head_only)
            self._client.answer(answer, close=close)

    def refuse(self, refusal: RefusalError) -> None:
        self._metrics.rejected[refusal.code] += 1
        self._client.answer_refusal(refusal)


def open_call(router: Router, client: ClientConnection, request: RequestHead, given: bytes) -> Call:
    """Return the call for a path that goes to no engine.

    RefusalError: 403 to a web page, 421 for a call of the control port, 404 for an unknown one; for a path that is not
    the router's own as `unserved.refusal`.
    """
    if given not in {b"/", b"/metrics", b"/router"} and not given.startswith(b"/router/"):
        raise plugged_in("router.unserved")(given)
    fields = [(b"host", b"localhost" if request.host is None else request.host)]
    if request.origin is not None:
        fields.append((b"origin", request.origin))
    method = "GET" if request.method == b"HEAD" else request.method.decode()
    call, ports = f"{method} {given.decode()}", router.control_ports
    if (why := cross_site(fields, router.hosts, setting="router.allowed_hosts")) is not None:
        raise RefusalError(403, "cross_site", f"{call[:200]}: {why}")
    own = sorted({"/router/health", *(name.split()[1] for name in _CONTROL)})
    reads: dict[str, Any] = {
        "GET /": lambda: {"service": "penstock router", "data": sorted(map(bytes.decode, DATA_PATHS)), "router": own},
        "GET /router/health": lambda: {"status": "ok", "pid": os.getpid(), "control_ports": ports},
    }
    if len(ports) == 1:
        reads |= {name: partial(do, router.dispatcher, b"") for name, do in calls().items() if name.startswith("GET ")}
    if call in reads:
        return OwnCall(router, client, request, reads[call])
    if call in _CONTROL:
        each = "make it on the control port of each process" if len(ports) > 1 else "make it on the control port"
        raise RefusalError(421, "control_port", f"{call} is no call of this port; {each}: {', '.join(map(str, ports))}")
    raise RefusalError(404, "not_found", f"no such call: {call[:200]}")
