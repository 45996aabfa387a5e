"""The router as one object: its sockets, its clients, and their access rights."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from functools import partial

from penstock.control_server import ControlServer, listen
from penstock.errors import ConfigError
from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.guard import has_key
from penstock.process import most_connections
from penstock.rooms import plugged_in
from penstock.router.admin import serve_control
from penstock.router.client_connection import HEALTH, Call, ClientConnection, Clients
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchange
from penstock.router.http import RefusalError, RequestHead
from penstock.router_settings import RouterConfig, base_url, refuse_open_host

BACKLOG = 4096
DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Paths that any engine answers alike and without state for a later call, in vLLM 0.26 to 0.32. A test reads every
route of the installed vLLM and fails for a route that is on no list."""


class Router:
    """Data plane of a fleet; runs in any asyncio event loop. With `access_log`, it logs one JSON line a request.

    Every request but `GET /router/health` needs `api_key` (None: no key). Control calls come to a port of their own
    (`admin.py`). Those that change the router need `admin_key` (None: `api_key`). ConfigError: an unknown policy.
    `process` is the index of this process among `config.workers`; `sockets` listen already (`workers.py`).
    """

    control_ports: tuple[int, ...] = ()
    """The control port of each process of this router, once it listens."""
    url = ""
    """The URL where it listens, `http://host:port`, once it does."""

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        process: int = 0,
        sockets: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        self.config = config or RouterConfig()
        self._api_key, self._admin_key = api_key, admin_key
        self.hosts = {name.lower() for name in (self.config.host, *self.config.allowed_hosts.split(","))}
        """Values of `Host` allowed in calls to the router itself, in addition to the names of `penstock.guard`."""
        self.dispatcher = Dispatcher(self.config, process=process)
        self.metrics = self.dispatcher.metrics
        self.clients = Clients(self.config, self.metrics.rejected, self._open_call, most_connections())
        self._data_paths = DATA_PATHS | {path.encode() for path in self.config.data_paths.split(",") if path}
        self._sockets = sockets
        self._server: asyncio.Server | None = None
        self._control: ControlServer | None = None

    async def start(self) -> None:
        """Listen as configured.

        Raises:
            ConfigError: an address cannot be used, or other machines can reach it and there is no key.
        """
        config = self.config
        refuse_open_host(config.host, self._api_key)
        data, control = self._sockets or open_both(config.host, config.port, config.control_port)
        self.control_ports = self.control_ports or (control.getsockname()[1],)  # before the first client asks for them
        accept = partial(ClientConnection, self.clients)
        self._server = await asyncio.get_running_loop().create_server(accept, sock=data, backlog=BACKLOG)
        self._control = serve_control(self.dispatcher, control, self.hosts, self._api_key, self._admin_key)
        self.url = base_url(*data.getsockname()[:2])
        self.dispatcher.sweep()

    async def close(self) -> None:
        """Stop listening and end every connection; answers under way break off."""
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.close()
        for client in list(self.clients.connected):
            client.transport.abort()
        await self.dispatcher.close()

    def _open_call(self, client: ClientConnection, request: RequestHead) -> Call:
        """Return the call that serves a request: an engine, or the router itself.

        RefusalError: 401 without the key; others as `other_calls.open_call`.
        """
        path = request.target.partition(b"?")[0]
        if self._api_key is not None and (path != HEALTH or request.method != b"GET"):
            accepted = [key for key in (self._admin_key, self._api_key) if key is not None]
            if not has_key(request.authorization, accepted):
                what = "is wrong" if request.authorization else "is missing"
                raise RefusalError(401, "bad_api_key", f"the router's API key {what}: send Authorization: Bearer KEY")
        if path in self._data_paths:
            return Exchange(client, request, self.dispatcher)
        return plugged_in("router.own_calls")(self, client, request, path)


def open_both(host: str, port: int, control_port: int) -> tuple[socket.socket, socket.socket]:
    """Return sockets that listen for clients and for control calls. ConfigError: as `open_socket`."""
    control = open_socket(host, control_port, "router.control_port")
    try:
        return open_socket(host, port, "router.port", backlog=BACKLOG), control
    except ConfigError:
        control.close()
        raise


def open_socket(host: str, port: int, setting: str, *, backlog: int = 128, shared: bool = False) -> socket.socket:
    """Return a socket as `control_server.listen`. ConfigError: the address cannot be used."""
    try:
        return listen(host, port, backlog=backlog, shared=shared)
    except OSError as error:
        number = error.errno or 0  # negative numbers come from getaddrinfo, which has its own texts
        hint = f"; choose another {setting}, or 0 for any free one" if number == errno.EADDRINUSE else ""
        why = os.strerror(number) if number > 0 else error.strerror or error
        raise ConfigError(f"the router cannot listen on {host}:{port}: {why}{hint}") from error
