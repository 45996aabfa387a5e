"""The router as one object: a listening socket, its clients, who may call what, and its own endpoints."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import ConfigError, PenstockError, StateError, UserError
from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.guard import cross_site, has_key, kind_of_path
from penstock.rooms import plugged_in
from penstock.router.backend import Backend
from penstock.router.client_connection import HEALTH, Call, ClientConnection, Clients
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchange
from penstock.router.http import RefusalError, RequestHead, response, shown
from penstock.router.memory import EngineEntry, Membership
from penstock.router.policies import EngineView, Hints
from penstock.settings import RouterConfig, refuse_open_host

BACKLOG = 4096
_SWEEP_S = 0.25
"""How often deadlines are checked. One timer for all: a timer for each request costs more than the request's head."""
_OWN_FILES = 64
"""Descriptors that a router needs besides those of its clients and of the connections to engines."""
_OWN = {b"/", b"/router", b"/metrics"}
"""The router's own endpoints besides those under `/router/`: any engine's metrics would be one of many."""
_CHANGES = {b"/router/engines"}
_READS = {b"GET", b"HEAD"}


def check_data_path(path: bytes, added: Collection[bytes] = ()) -> None:
    """Return if requests for `path` go to an engine; `added`: paths of the configuration.

    Raises:
        RefusalError: 400 for a path that servers read in different ways, 403 for a call to one engine, 404 for any
            other path.
    """
    if path in added or path in DATA_PATHS:
        return
    kind = kind_of_path(path)
    if kind == "ambiguous":
        what = "without escapes, empty or dot segments and special characters"
        raise RefusalError(400, "bad_path", f"path {shown(path)} is not canonical; send it {what}")
    name = shown(path)[1:-1]
    if kind == "control":
        what = f"{name} would reach one engine only"
        raise RefusalError(403, "control_call", f"{what}; control goes to every engine by the fleet's own client")
    if kind == "private":
        raise RefusalError(403, "control_call", f"{name} would tell of one engine only; ask that engine itself")
    hint = "GET / lists the data calls that are; router.data_paths adds to them"
    raise RefusalError(404, "unknown_path", f"{name} is not served here: {hint}")


class Router:
    """Data plane of a fleet; runs in any asyncio event loop. With `access_log`, it logs one JSON line a request.

    `api_key` is asked for on every request but `GET /router/health` (None: no key is), `admin_key` where a call changes
    the router (None: `api_key` is). `process` is which of `config.workers` processes this is. ConfigError: an unknown
    policy.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        process: int = 0,
    ) -> None:
        self.config = config or RouterConfig()
        self._api_key, self._admin_key = api_key, admin_key
        self._hosts = {name.lower() for name in self.config.allowed_hosts.split(",")}
        """What `Host` may say in calls to the router itself, besides the names of `penstock.guard`."""
        self.dispatcher = Dispatcher(self.config, process=process)
        self.metrics = self.dispatcher.metrics
        self.admin = Admin(self.dispatcher)
        self.clients = Clients(self.config, self.metrics, self._open_call, _most_clients())
        self._added_paths = frozenset(path.encode() for path in self.config.data_paths.split(",") if path)
        self._server: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where it listens, `http://host:port`."""
        if not self._url:
            raise StateError("the router has not been started")
        return self._url

    async def start(
        self, host: str | None = None, port: int | None = None, *, sock: socket.socket | None = None
    ) -> None:
        """Listen on `host` and `port` (default: those of the configuration; port 0: any free one), or on `sock`.

        Raises:
            ConfigError: the address cannot be used, or other machines can reach it and there is no key.
        """
        host = self.config.host if host is None else host
        port = self.config.port if port is None else port
        refuse_open_host(host, self._api_key)
        self._hosts.add(host.lower())
        self.clients.most = _most_clients()
        loop = asyncio.get_running_loop()
        try:
            if sock is None:
                server = await loop.create_server(self.accept, host, port, backlog=BACKLOG)
            else:
                server = await loop.create_server(self.accept, sock=sock, backlog=BACKLOG)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._server = server
        self._url = base_url(host, server.sockets[0].getsockname()[1])
        self._sweep()

    def accept(self) -> ClientConnection:
        """Return the protocol of one more connection from a client."""
        return ClientConnection(self.clients)

    async def close(self) -> None:
        """Stop listening and end every connection; answers under way end as broken transfers."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._server is not None:
            self._server.close()
        for client in list(self.clients.connected):
            client.transport.abort()
        await self.dispatcher.close()

    def _open_call(self, client: ClientConnection, request: RequestHead) -> Call:
        """Return what serves a request: the router itself, or an engine.

        Raises:
            RefusalError: 401 without the key, 400, 403 or 404 for a path that no engine is asked for, 403 for a call to
                the router itself that comes from a web page.
        """
        self._check_key(request)
        path = request.target.partition(b"?")[0]
        if path in _OWN or path.startswith(b"/router/"):
            self._check_page(request)
            return AdminCall(client, request, self.admin)
        check_data_path(path, self._added_paths)
        return Exchange(client, request, self.dispatcher)

    def _check_key(self, request: RequestHead) -> None:
        """Return if the request has the key that it needs; RefusalError: 401."""
        api_key, admin_key = self._api_key, self._admin_key
        if api_key is None and admin_key is None:
            return
        path = request.target.partition(b"?")[0]
        needs_admin = admin_key is not None and path in _CHANGES and request.method not in _READS
        if (api_key is None and not needs_admin) or (path == HEALTH and request.method == b"GET"):
            return
        accepted = (admin_key,) if needs_admin else (admin_key, api_key)
        if not has_key(request.authorization, [key for key in accepted if key is not None]):
            kind = "admin" if needs_admin else "API"
            what = "is wrong" if request.authorization else "is missing"
            raise RefusalError(401, "bad_api_key", f"the router's {kind} key {what}: send Authorization: Bearer KEY")

    def _check_page(self, request: RequestHead) -> None:
        """Return if a call to the router's own endpoints comes from no web page; RefusalError: 403."""
        fields = [(b"host", b"localhost" if request.host is None else request.host)]
        if request.origin is not None:
            fields.append((b"origin", request.origin))
        why = cross_site(fields, self._hosts, setting="router.allowed_hosts")
        if why is not None:
            call = f"{request.method.decode()} {shown(request.target)[1:-1]}"
            raise RefusalError(403, "cross_site", f"{call}: {why}")

    def _sweep(self) -> None:
        now = time.monotonic()
        self.clients.sweep(now)
        self.dispatcher.sweep(now)
        self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Make the error of an address that cannot be used."""
    hint = "; choose another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"the router cannot listen on {host}:{port}: {error.strerror or error}{hint}")


def base_url(host: str, port: int) -> str:
    """Write the URL of a host, which may be an IPv6 address, and a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _most_clients() -> int:
    """With one connection to an engine for each, they take every descriptor."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20 if limit == resource.RLIM_INFINITY else max(limit - _OWN_FILES, 2)) // 2


# --- its own endpoints -----------------------------------------------------------------------------------------------


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
        self._body += piece
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done:
            self._execute()

    def begin(self, piece: bytes | memoryview, *, done: bool) -> None:
        if self._request.length < 0:
            raise RefusalError(411, "length_required", "send an admin body with Content-Length")
        self.add_body(piece, done=done)

    def refuse(self, refusal: RefusalError) -> None:
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
