"""The router as one object: a listening socket, its clients, and the dispatcher behind them."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import socket
import time

import orjson

from penstock.config import RouterConfig, refuse_open_host
from penstock.errors import StateError, UserError
from penstock.router.admin import Access, AdminCall
from penstock.router.client_connection import Call, ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchange
from penstock.router.head import RequestHead, check_data_path
from penstock.router.metrics import Metrics

_BACKLOG = 4096
_SWEEP_S = 0.25
"""How often deadlines are looked at. One timer for all: a timer for each request costs more than the request's head."""
_OWN_FILES = 64
"""Descriptors that a router needs besides those of its clients and of the connections to engines."""
_MOST_TARGETS, _LONGEST_TARGET = 256, 512
_OWN = {b"/", b"/router", b"/metrics"}
"""The router's own endpoints besides those under `/router/`: any engine's metrics would be one of many."""
_TRACE_ID = re.compile(rb"[0-9A-Fa-f]{2}-([0-9A-Fa-f]{32})-")
"""W3C Trace Context, section 3.2: version, trace id, parent id, flags."""
_access = logging.getLogger("penstock.router.admin")


class Router:
    """Data plane of a fleet; runs in any asyncio event loop.

    Args:
        config: limits and the policy. With `access_log`, one JSON line a request goes to the logger
            `penstock.router.admin`.
        api_key: asked for on every request but `GET /router/health`; None: nobody is asked.
        admin_key: asked for where a call changes the router; None: `api_key` does.
        process: which of `config.workers` processes this is.

    Raises:
        ConfigError: for an unknown policy.
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
        self._keys = api_key, admin_key
        self.access = self._access("")
        self.metrics = Metrics()
        self.dispatcher = Dispatcher(self.config, self.metrics, process=process)
        self.dispatcher.keys = self._keys
        self._added_paths = frozenset(path.encode() for path in self.config.data_paths.split(",") if path)
        self.clients: set[ClientConnection] = set()
        self.strangers: dict[ClientConnection, None] = {}
        """Clients that have sent no head with the key yet, the oldest first."""
        self._most_clients = _most_clients()
        """With one connection to an engine for each, they take every descriptor."""
        self._for_engines: set[bytes] = set()
        """Targets that were found to be passed on: nearly every request has one of a few."""
        self._server: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._url = ""
        if self.config.access_log:
            self.dispatcher.on_end = _log

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
            ConfigError: other machines can reach the address, and there is no key.
            UserError: the address cannot be used.
        """
        host = self.config.host if host is None else host
        refuse_open_host(host, self._keys[0])
        self.access = self._access(host)
        port = self.config.port if port is None else port
        self._most_clients = _most_clients()
        loop = asyncio.get_running_loop()
        try:
            if sock is None:
                self._server = await loop.create_server(lambda: ClientConnection(self), host, port, backlog=_BACKLOG)
            else:
                self._server = await loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=_BACKLOG)
        except OSError as error:
            hint = "; choose another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
            raise UserError(f"the router cannot listen on {host}:{port}: {error.strerror or error}{hint}") from error
        name = f"[{host}]" if ":" in host else host
        self._url = f"http://{name}:{self._server.sockets[0].getsockname()[1]}"
        self._sweep()

    async def close(self) -> None:
        """Stop listening and end every connection; answers under way end as broken transfers."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.transport.abort()
        await self.dispatcher.close()

    def accepted(self, client: ClientConnection) -> None:
        """A client has connected; where descriptors run short, the oldest of many strangers gives way to it."""
        self.clients.add(client)
        self.strangers[client] = None
        if len(self.clients) > self._most_clients and len(self.strangers) > self._most_clients // 2:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            self.clients.discard(oldest)
            oldest.transport.abort()

    def call(self, client: ClientConnection, request: RequestHead) -> Call:
        """What serves a request: the router itself, or an engine.

        Raises:
            RefusalError: 400, 403 or 404 for a path that no engine is asked for (`penstock.router.head`), 403 for a
                call to the router itself that comes from a web page.
        """
        target = request.target
        if target in self._for_engines:
            return Exchange(client, request, self.dispatcher)
        path = target.partition(b"?")[0]
        if path in _OWN or path.startswith(b"/router/"):
            self.access.check_page(request)
            return AdminCall(client, request, self.dispatcher)
        check_data_path(path, self._added_paths)
        if len(self._for_engines) < _MOST_TARGETS and len(target) <= _LONGEST_TARGET:
            self._for_engines.add(target)
        return Exchange(client, request, self.dispatcher)

    def _access(self, host: str) -> Access:
        return Access(*self._keys, [host, *self.config.allowed_hosts.split(",")])

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        for client in [client for client in self.clients if client.deadline <= now]:
            client.expire()
        self.dispatcher.sweep(now)
        self._sweep_timer = loop.call_later(_SWEEP_S, self._sweep)


def _most_clients() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 20 if limit == resource.RLIM_INFINITY else max(limit - _OWN_FILES, 2)) // 2


def _log(exchange: Exchange) -> None:
    request, engine = exchange.request, exchange.engine
    trace = _TRACE_ID.match(request.traceparent)
    line = {
        "method": request.method.decode("latin-1"),
        "target": request.target.decode("latin-1"),
        "status": exchange.status,
        "engine": None if engine is None else engine.name,
        "session": request.session_id,
        "group": request.group_id,
        "trace": None if trace is None else trace[1].decode().lower(),
        "bytes_in": exchange.bytes_in,
        "bytes_out": exchange.bytes_out,
        "seconds": round(time.monotonic() - exchange.started_at, 6),
        "hold_seconds": round(exchange.hold_seconds, 6),
        "gate_seconds": round(exchange.gate_seconds, 6),
        "tried": [engine.name for engine in exchange.tried],
        "outcome": exchange.outcome or "ok",
    }
    _access.info(orjson.dumps(line).decode())
