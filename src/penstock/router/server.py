"""The router as one object: its sockets, its clients, and their access rights."""

from __future__ import annotations

import asyncio
import errno
import os
import time

from penstock.errors import ConfigError, StateError
from penstock.guard import cross_site, has_key
from penstock.process import most_connections
from penstock.rooms import plugged_in
from penstock.router.admin import DATA_PATHS, AdminCall
from penstock.router.client_connection import HEALTH, Call, ClientConnection, Clients
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchange
from penstock.router.http import RefusalError, RequestHead, shown
from penstock.settings import RouterConfig, refuse_open_host

BACKLOG = 4096
_SWEEP_S = 0.25
"""Seconds between two checks of all deadlines. A timer for each request would cost more than parsing its head."""
_OWN = {b"/", b"/router", b"/metrics"}
"""The router's own endpoints outside `/router/`; an engine's `/metrics` would cover one of many."""
_CHANGES = {b"/router/engines"}
_READS = {b"GET", b"HEAD"}


class Router:
    """Data plane of a fleet; runs in any asyncio event loop. With `access_log`, it logs one JSON line a request.

    Every request but `GET /router/health` needs `api_key` (None: no key). Calls that change the router need `admin_key`
    (None: `api_key`). ConfigError: an unknown policy.
    `process` is the index of this process among `config.workers` (`workers.py`).
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
        """Values of `Host` allowed in calls to the router itself, in addition to the names of `penstock.guard`."""
        self.dispatcher = Dispatcher(self.config, process=process)
        self.metrics = self.dispatcher.metrics
        self.clients = Clients(self.config, self.metrics, self._open_call, most_connections())
        self._added_paths = frozenset(path.encode() for path in self.config.data_paths.split(",") if path)
        self._servers: list[asyncio.Server] = []
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """The URL where it listens, `http://host:port`."""
        if not self._url:
            raise StateError("the router has not been started")
        return self._url

    async def start(self) -> None:
        """Listen as configured.

        Raises:
            ConfigError: the address cannot be used, or other machines can reach it and there is no key.
        """
        host, port = self.config.host, self.config.port
        refuse_open_host(host, self._api_key)
        self._hosts.add(host.lower())
        self.clients.most = most_connections()
        try:
            self._servers = await self._listen(host, port)
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        self._url = base_url(host, self._servers[0].sockets[0].getsockname()[1])
        self._sweep()

    async def _listen(self, host: str, port: int) -> list[asyncio.Server]:
        return [await asyncio.get_running_loop().create_server(self.accept, host, port, backlog=BACKLOG)]

    def accept(self) -> ClientConnection:
        """Return the protocol for a new client connection."""
        return ClientConnection(self.clients)

    async def close(self) -> None:
        """Stop listening and end every connection; answers under way break off."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for server in self._servers:
            server.close()
        for client in list(self.clients.connected):
            client.transport.abort()
        await self.dispatcher.close()

    def _open_call(self, client: ClientConnection, request: RequestHead) -> Call:
        """Return the call that serves a request: the router itself, or an engine.

        Raises:
            RefusalError: 401 without the key; 400, 403 or 404 for a path that goes to no engine; 403 for a call to the
                router itself from a web page.
        """
        self._check_key(request)
        path = request.target.partition(b"?")[0]
        if path in _OWN or path.startswith(b"/router/"):
            self._check_page(request)
            return self._own_call(client, request, path)
        if path not in DATA_PATHS and path not in self._added_paths:
            raise plugged_in("router.unserved")(path)
        return Exchange(client, request, self.dispatcher)

    def _own_call(self, client: ClientConnection, request: RequestHead, path: bytes) -> Call:  # noqa: ARG002 - a worker's
        return AdminCall(client, request, self.dispatcher, ())

    def _check_key(self, request: RequestHead) -> None:
        """Check that the request has the key that it needs. RefusalError: 401."""
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
        """Check that no web page makes a call to the router itself. RefusalError: 403."""
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
    """Return the error for an address that cannot be used."""
    number = error.errno or 0  # negative numbers come from getaddrinfo, which has its own texts
    hint = "; choose another port, or 0 for any free one" if number == errno.EADDRINUSE else ""
    why = os.strerror(number) if number > 0 else error.strerror or error
    return ConfigError(f"the router cannot listen on {host}:{port}: {why}{hint}")


def base_url(host: str, port: int) -> str:
    """Return the URL of a port and a host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
