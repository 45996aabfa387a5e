"""The router as one object: its sockets, its clients, and their access rights."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from penstock.control_server import ControlServer, listen
from penstock.errors import ConfigError, StateError
from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.guard import has_key
from penstock.process import most_connections
from penstock.rooms import plugged_in
from penstock.router.admin import serve_control
from penstock.router.client_connection import HEALTH, Call, ClientConnection, Clients
from penstock.router.dispatcher import Dispatcher
from penstock.router.exchange import Exchange
from penstock.router.http import RefusalError, RequestHead
from penstock.router_settings import RouterConfig, refuse_open_host

BACKLOG = 4096
DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Paths that any engine answers alike and without state for a later call, in vLLM 0.26 to 0.32. A test reads every
route of the installed vLLM and fails for a route that is on no list."""


class Router:
    """Data plane of a fleet; runs in any asyncio event loop. With `access_log`, it logs one JSON line a request.

    Every request but `GET /router/health` needs `api_key` (None: no key). Control calls come to a port of their own
    (`admin.py`). Those that change the router need `admin_key` (None: `api_key`). ConfigError: an unknown policy.
    `process` is the index of this process among `config.workers` (`workers.py`).
    """

    control_ports: tuple[int, ...] = ()
    """The control port of each process of this router, once it listens."""

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
        self.hosts = {name.lower() for name in (self.config.host, *self.config.allowed_hosts.split(","))}
        """Values of `Host` allowed in calls to the router itself, in addition to the names of `penstock.guard`."""
        self.dispatcher = Dispatcher(self.config, process=process)
        self.metrics = self.dispatcher.metrics
        self.clients = Clients(self.config, self.metrics, self._open_call, most_connections())
        self._data_paths = DATA_PATHS | {path.encode() for path in self.config.data_paths.split(",") if path}
        self._servers: list[asyncio.Server] = []
        self._control: ControlServer | None = None
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
            ConfigError: an address cannot be used, or other machines can reach it and there is no key.
        """
        refuse_open_host(self.config.host, self._api_key)
        control = await self._listen()
        self._control = serve_control(self.dispatcher, control, self.hosts, self._api_key, self._admin_key)
        # A name may have an address of each kind, where the control port has one: its clients must not ask the other.
        data = next(sock for sock in self._servers[0].sockets if sock.family == control.family)
        self._url = base_url(*data.getsockname()[:2])
        self.dispatcher.sweep()

    async def _listen(self) -> socket.socket:
        """Open both ports, and return the socket of the control port."""
        host, port, loop = self.config.host, self.config.port, asyncio.get_running_loop()
        control = control_socket(host, self.config.control_port)
        self.control_ports = (control.getsockname()[1],)  # before the first client can ask for them
        try:
            self._servers.append(await loop.create_server(self.accept, host, port, backlog=BACKLOG))
        except OSError as error:
            control.close()
            raise cannot_listen(host, port, error) from error
        return control

    def accept(self) -> ClientConnection:
        """Return the protocol for a new client connection."""
        return ClientConnection(self.clients)

    async def close(self) -> None:
        """Stop listening and end every connection; answers under way break off."""
        if self._control is not None:
            self._control.close()
        for server in self._servers:
            server.close()
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


def control_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens for control calls. ConfigError: the address cannot be used."""
    try:
        return listen(host, port)
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be used."""
    number = error.errno or 0  # negative numbers come from getaddrinfo, which has its own texts
    hint = "; choose another port, or 0 for any free one" if number == errno.EADDRINUSE else ""
    why = os.strerror(number) if number > 0 else error.strerror or error
    return ConfigError(f"the router cannot listen on {host}:{port}: {why}{hint}")


def base_url(host: str, port: int) -> str:
    """Return the URL of a port and a host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
