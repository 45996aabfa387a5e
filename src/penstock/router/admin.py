"""Who may call the router: keys for all of it, and for its own endpoints no web pages and no foreign host names."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import ConfigError, PenstockError, StateError, UserError
from penstock.guard import cross_site, has_key
from penstock.router.head import DATA_PATHS, RequestHead
from penstock.router.http import Hints, RefusalError, response, shown
from penstock.router.membership import EngineEntry, Membership
from penstock.router.metrics import PREFIX, Family, Sample, render

if TYPE_CHECKING:
    from penstock.router.backend import Engine
    from penstock.router.client_connection import ClientConnection
    from penstock.router.dispatcher import Dispatcher
    from penstock.router.policies.base import EngineView

HEALTH = b"/router/health"
"""Needs no key."""
_CHANGES = {b"/router/engines", b"/router/gate", b"/router/policy"}
_READS = {b"GET", b"HEAD"}


class Access:
    """The rules of one router.

    Args:
        api_key: asked for on every request but the health check; None: nobody is asked.
        admin_key: asked for where a call changes the router, and accepted everywhere; None: `api_key` does.
        hosts: names that `Host` may have in calls to the router itself, besides those of `penstock.guard`.
    """

    def __init__(self, api_key: str | None, admin_key: str | None, hosts: Iterable[str] = ()) -> None:
        self._api_key = api_key
        self._admin_key = admin_key
        self._hosts = {name.lower() for name in hosts}
        self.asks_for_key = api_key is not None or admin_key is not None

    def check_key(self, request: RequestHead) -> None:
        """Return if the request has the key that it needs; RefusalError: 401."""
        path = request.target.partition(b"?")[0]
        needs_admin = self._admin_key is not None and path in _CHANGES and request.method not in _READS
        if (self._api_key is None and not needs_admin) or (path == HEALTH and request.method == b"GET"):
            return
        accepted = (self._admin_key,) if needs_admin else (self._admin_key, self._api_key)
        if not has_key(request.authorization, [key for key in accepted if key is not None]):
            kind = "admin" if needs_admin else "API"
            what = "is wrong" if request.authorization else "is missing"
            raise RefusalError(401, "bad_api_key", f"the router's {kind} key {what}: send Authorization: Bearer KEY")

    def check_page(self, request: RequestHead) -> None:
        """Return if a call to the router's own endpoints comes from no web page; RefusalError: 403."""
        fields = [(b"host", b"localhost" if request.host is None else request.host)]
        if request.origin is not None:
            fields.append((b"origin", request.origin))
        why = cross_site(fields, self._hosts, setting="router.allowed_hosts")
        if why is not None:
            call = f"{request.method.decode()} {shown(request.target)[1:-1]}"
            raise RefusalError(403, "cross_site", f"{call}: {why}")


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


Answer = tuple[bytes, str]
"""Content and its type."""

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of figures as text."""
_METHODS = {
    "/": "GET",
    "/router/health": "GET",
    "/router/engines": "GET or PUT",
    "/router/gate": "POST",
    "/router/policy": "PUT",
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
    model_config = ConfigDict(extra="forbid", strict=True)


M = TypeVar("M", bound=_Strict)


class _EngineBody(_Strict):
    name: str
    url: str
    weight_version: int = 0
    eligible: bool = True
    draining: bool = False
    adapters: list[str] | None = None
    dp_rank: int | None = None
    max_model_len: int | None = None
    api_key: str | None = None

    def entry(self) -> EngineEntry:
        given: dict[str, Any] = self.model_dump()
        given["adapters"] = None if self.adapters is None else tuple(self.adapters)
        return EngineEntry(**given)


class _EnginesBody(_Strict):
    epoch: int = Field(ge=0)
    engines: list[_EngineBody]
    cut: list[str] = []


class _GateBody(_Strict):
    closed: bool
    adapter: Text | None = None
    engine: Text | None = None


class _PolicyBody(_Strict):
    policy: Text
    prefix_length: int | None = Field(default=None, ge=1)
    overload_threshold: float | None = Field(default=None, ge=1)


class _ChoiceBody(_Strict):
    prompt_tokens: int = Field(default=0, ge=0)
    prefix_hashes: Text | None = None


class _SessionBody(_Strict):
    session_id: Text


def execute(dispatcher: Dispatcher, method: str, path: str, body: bytes) -> Answer:  # noqa: C901 - a table
    """Do one admin call on this process; it is in force when this returns.

    Raises:
        RefusalError: 400 for a body that does not fit, 404 for an unknown path, 405 for a method that does
            not go with the path, 409 for an old epoch.
    """
    match (method, path):
        case ("GET", "/"):
            answer: dict[str, Any] = _SERVED
        case ("GET", "/router/health"):
            port = dispatcher.shared_port
            ports = () if port is None else port.control_ports
            answer = {"status": "ok", "pid": os.getpid(), "control_ports": ports}
        case ("GET", "/router/engines"):
            answer = state(dispatcher)
        case ("PUT", "/router/engines"):
            answer = _set_engines(dispatcher, _parse(_EnginesBody, body))
        case ("POST", "/router/gate"):
            answer = _set_gate(dispatcher, _parse(_GateBody, body))
        case ("PUT", "/router/policy"):
            answer = _set_policy(dispatcher, _parse(_PolicyBody, body))
        case ("POST", "/router/choose"):
            asked = _parse(_ChoiceBody, body)
            hashes = None if asked.prefix_hashes is None else asked.prefix_hashes.encode()
            hints = Hints(prompt_tokens=asked.prompt_tokens, prefix_hashes=hashes)
            answer = {"engine": dispatcher.placement.choose(hints, time.monotonic())}
        case ("POST", "/router/sessions/finish"):
            answer = {"finished": dispatcher.finish_session(finished_session(body))}
        case ("GET", "/router/metrics" | "/metrics"):
            return render(families(dispatcher)).encode(), PROMETHEUS
        case _ if path in _METHODS:
            raise RefusalError(
                405, "method_not_allowed", f"{method} does not go with {path}, which takes {_METHODS[path]}"
            )
        case _:
            raise RefusalError(404, "not_found", f"no such endpoint: {path[:200]}")
    return orjson.dumps(answer), JSON


def finished_session(body: bytes) -> str:
    """Session that a body of `POST /router/sessions/finish` names; RefusalError: 400, for one that does not fit."""
    return _parse(_SessionBody, body).session_id


def _set_engines(dispatcher: Dispatcher, body: _EnginesBody) -> dict[str, Any]:
    membership = _replaced(dispatcher.membership, body)
    dispatcher.set_engines(membership.epoch, membership.engines, body.cut)
    return {"epoch": membership.epoch, "engines": len(membership.engines)}


def _replaced(present: Membership, body: _EnginesBody) -> Membership:
    try:
        return present.replaced_by(body.epoch, [engine.entry() for engine in body.engines])
    except UserError as error:
        raise RefusalError(400, "bad_engines", str(error)) from error
    except StateError as error:
        raise RefusalError(409, "old_epoch", str(error)) from error


def _set_gate(dispatcher: Dispatcher, body: _GateBody) -> dict[str, Any]:
    if body.adapter is not None and body.engine is not None:
        raise RefusalError(400, "bad_gate", "name an adapter or an engine, not both; neither is the gate for all")
    if body.closed and body.engine is not None and body.engine not in dispatcher.engines:
        known = ", ".join(dispatcher.engines) or "none"
        raise RefusalError(400, "bad_gate", f"no engine {body.engine!r} in the set; known: {known}")
    dispatcher.set_gate(closed=body.closed, adapter=body.adapter, engine=body.engine)
    return body.model_dump(exclude_none=True)


def _set_policy(dispatcher: Dispatcher, body: _PolicyBody) -> dict[str, Any]:
    names = tuple(name.strip() for name in body.policy.split(","))
    try:
        dispatcher.set_policy(names, body.model_dump(exclude={"policy"}, exclude_none=True))
    except ConfigError as error:
        raise RefusalError(400, "bad_policy", str(error)) from error
    return policy_in_force(dispatcher)


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "bad_json", f"the body is not JSON: {error}") from None
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise RefusalError(400, "bad_json", f"the body does not fit: {what}") from None


_MAX_BODY = 4 << 20


class AdminCall:
    """One admin request."""

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self._client = client
        self._request = request
        self._dispatcher = dispatcher
        self._body = bytearray()
        self._done = False
        self._started = False
        self._waiting: asyncio.Task[None] | None = None

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self._body += piece
        self._done = done
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done and self._started:
            self._execute()

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self.add_body(piece, done=done)
        self._started = True
        if self._request.length < 0:
            raise RefusalError(411, "length_required", "send an admin body with Content-Length")
        if self._done:
            self._execute()

    def refuse(self, refusal: RefusalError) -> None:
        """See `Call`."""
        self._dispatcher.metrics.rejected[refusal.code] += 1
        self._client.answer_refusal(refusal)

    def cancel(self) -> None:
        """The client has gone; what it asked for is done all the same."""

    def pause(self, *, paused: bool) -> None:
        """Answers are small."""

    def _execute(self) -> None:
        method = "GET" if self._request.method == b"HEAD" else self._request.method.decode()
        path = self._request.target.partition(b"?")[0].decode()
        port = self._dispatcher.shared_port
        body = bytes(self._body)
        try:
            if port is None or not port.answers(self._client.transport):
                self._answer(execute(self._dispatcher, method, path, body))
            else:
                answer = port.call(self._dispatcher, method, path, body)
                self._waiting = asyncio.get_running_loop().create_task(self._wait(answer))
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
