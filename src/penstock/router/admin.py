"""The router's own endpoints: its membership, gates, policy and figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import ConfigError, PenstockError, StateError, UserError
from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.rooms import plugged_in
from penstock.router import EngineEntry, Membership
from penstock.router.backend import Backend
from penstock.router.client_connection import ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.http import RefusalError, RequestHead, response
from penstock.router.policies import EngineView, Hints


def state(dispatcher: Dispatcher) -> dict[str, Any]:
    """What `GET /router/engines` answers; `penstock.router.admin_client.RouterState` explains each value."""
    gate, placement = dispatcher.gate, dispatcher.placement
    views = placement.views()
    return {
        "epoch": dispatcher.membership.epoch,
        "gate_closed": gate.closed,
        "held": len(gate),
        "held_bytes": gate.held_bytes,
        "held_by": gate.held_by(),
        "requests": dispatcher.metrics.requests,
        "sessions": len(placement.sessions),
        "moved_sessions": placement.turns["moved"],
        "placements": dict(placement.rules),
        "policy": placement.config.model_dump(include={"policy", "prefix_length", "overload_threshold"}),
        "workers": [os.getpid()],
        "engines": [_engine(dispatcher, b, views[b.name]) for b in dispatcher.backends.values()],
    }


def _engine(dispatcher: Dispatcher, backend: Backend, view: EngineView) -> dict[str, Any]:
    entry = backend.engine.entry
    sessions = dispatcher.placement.sessions.counts(entry.name)[0]
    shown = ("name", "url", "weight_version", "eligible", "draining", "dp_rank")
    return {name: getattr(entry, name) for name in shown} | {
        "drained": entry.draining and not view.outstanding and not sessions,
        "down": backend.engine.down,
        "breaker_openings": backend.openings,
        "dead_answers": backend.dead_answers,
        "failure": backend.failure,
        "outstanding": view.outstanding,
        "outstanding_tokens": view.outstanding_tokens,
        "resident_tokens": view.resident_tokens,
        "sessions": sessions,
        "kv_usage": view.kv_usage,
        "kv_capacity": view.kv_capacity,
        "requests": backend.requests,
    }


Answer = tuple[bytes, str]
"""Content and its type."""

DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Any engine gives the same answer to these, and keeps nothing of them that a later call needs. vLLM 0.26 to 0.32: a
test reads every route of the vLLM in use and fails for one that is on no list."""
JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of figures as text."""
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
"""What `GET /` answers; paths of the configuration are served besides."""
Text = Annotated[str, Field(min_length=1, max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


M = TypeVar("M", bound=_Strict)


class _Policy(_Strict):
    policy: Text | None = None
    prefix_length: int | None = None
    overload_threshold: float | None = None


class _EnginesBody(_Strict):
    epoch: int = Field(ge=0)
    engines: list[EngineEntry]
    cut: list[str] = []
    closed: bool = False
    policy: _Policy = _Policy()


class _ChoiceBody(_Strict):
    prompt_tokens: int = Field(default=0, ge=0)
    prefix_hashes: Text | None = None


class _SessionBody(_Strict):
    session_id: Text


class Admin:
    """The router's own endpoints, which show and change what a dispatcher has."""

    control_ports: tuple[int, ...] = ()
    """Where each of several processes that serve one port answers for itself; empty: there is one process."""
    answer_for_all: Callable[[asyncio.Transport, str, str, bytes], Awaitable[Answer] | None] | None = None
    """The plug for several processes (`penstock.router.workers`): answers a call that came by their common port."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def execute(self, method: str, path: str, body: bytes) -> Answer:
        """Do one call on this process; it is in force when this returns.

        Raises:
            RefusalError: 400 for a body that does not fit, 404 for an unknown path, 405 for a method that does
                not go with the path, 409 for an old epoch.
        """
        dispatcher = self.dispatcher
        match (method, path):
            case ("GET", "/"):
                answer: dict[str, Any] = _SERVED
            case ("GET", "/router/health"):
                answer = {"status": "ok", "pid": os.getpid(), "control_ports": self.control_ports}
            case ("GET", "/router/engines"):
                answer = state(dispatcher)
            case ("PUT", "/router/engines"):
                answer = _announce(dispatcher, _parse(_EnginesBody, body))
            case ("POST", "/router/choose"):
                asked = _parse(_ChoiceBody, body)
                hashes = None if asked.prefix_hashes is None else asked.prefix_hashes.encode()
                hints = Hints(prompt_tokens=asked.prompt_tokens, prefix_hashes=hashes)
                closed = dispatcher.gate.closed
                answer = {"engine": None if closed else dispatcher.placement.choose(hints, time.monotonic())}
            case ("POST", "/router/sessions/finish"):
                answer = {"finished": dispatcher.finish_session(finished_session(body))}
            case ("GET", "/router/metrics" | "/metrics"):
                return plugged_in("figures")(dispatcher).encode(), PROMETHEUS
            case _:
                raise _no_such_call(method, path)
        return orjson.dumps(answer), JSON


def _no_such_call(method: str, path: str) -> RefusalError:
    if path not in _METHODS:
        return RefusalError(404, "not_found", f"no such endpoint: {path[:200]}")
    what = f"{method} does not go with {path}, which takes {_METHODS[path]}"
    return RefusalError(405, "method_not_allowed", what)


def finished_session(body: bytes) -> str:
    """Session that a body of `POST /router/sessions/finish` names; RefusalError: 400, for one that does not fit."""
    return _parse(_SessionBody, body).session_id


def _announce(dispatcher: Dispatcher, body: _EnginesBody) -> dict[str, Any]:
    try:
        policy = body.policy.model_dump(exclude_none=True)
        dispatcher.announce(Membership(body.epoch, tuple(body.engines), body.closed, policy, tuple(body.cut)))
    except ConfigError as error:
        raise RefusalError(400, "bad_policy", str(error)) from error
    except UserError as error:
        raise RefusalError(400, "bad_engines", str(error)) from error
    except StateError as error:
        raise RefusalError(409, "old_epoch", str(error)) from error
    return {"epoch": dispatcher.membership.epoch, "engines": len(dispatcher.backends)}


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        for e in error.errors():
            if isinstance(cause := e.get("ctx", {}).get("error"), UserError):  # of `EngineEntry`
                raise RefusalError(400, "bad_engines", str(cause)) from None
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise RefusalError(400, "bad_json", f"the body does not fit: {what}") from None


_MAX_BODY = 4 << 20


class AdminCall:
    """One request to the router itself."""

    _waiting: asyncio.Task[None] | None = None

    def __init__(self, client: ClientConnection, request: RequestHead, admin: Admin) -> None:
        self._client = client
        self._request = request
        self._admin = admin
        self._body = bytearray()

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self._body += piece
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done:
            self._execute()

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        if self._request.length < 0:
            raise RefusalError(411, "length_required", "send an admin body with Content-Length")
        self.add_body(piece, done=done)

    def refuse(self, refusal: RefusalError) -> None:
        """See `Call`."""
        self._admin.dispatcher.metrics.rejected[refusal.code] += 1
        self._client.answer_refusal(refusal)

    def cancel(self) -> None:
        """The client has gone; what it asked for is done all the same."""

    def pause(self, *, paused: bool) -> None:
        """Answers are small."""

    def _execute(self) -> None:
        method = "GET" if self._request.method == b"HEAD" else self._request.method.decode()
        path = self._request.target.partition(b"?")[0].decode()
        admin, body = self._admin, bytes(self._body)
        try:
            plug = admin.answer_for_all
            answer = None if plug is None else plug(self._client.transport, method, path, body)
            if answer is None:
                self._answer(admin.execute(method, path, body))
            else:
                self._waiting = asyncio.ensure_future(self._wait(answer))
        except RefusalError as refusal:
            self.refuse(refusal)

    async def _wait(self, answer: Awaitable[Answer]) -> None:
        try:
            self._answer(await answer)
        except PenstockError as error:
            if not self._client.transport.is_closing():
                # Any other error than a refusal says that another process is gone, or too slow.
                self.refuse(
                    error if isinstance(error, RefusalError) else RefusalError(503, "no_worker", f"{error}; retry")
                )

    def _answer(self, answer: Answer) -> None:
        if self._client.transport.is_closing():
            return
        content, content_type = answer
        close = not self._request.keep_alive
        head_only = self._request.method == b"HEAD"
        self._client.answer(
            response(200, content, content_type=content_type, close=close, head_only=head_only), close=close
        )
