"""Several processes that serve one port as one router; this process forks them and replaces those that end.

Each has its own listening socket on the port and another on its own control port. The kernel spreads connections over
the former. Each process knows its own sessions and load. The owner of the fleet announces engines, gate and policy to
every process (`admin_client.py`). Until then, a process holds its requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from penstock.router.admin import AdminCall
from penstock.router.client_connection import HEALTH, Call, ClientConnection
from penstock.router.http import RefusalError, RequestHead, shown
from penstock.router.server import BACKLOG, Router, base_url, cannot_listen
from penstock.settings import RouterConfig, refuse_open_host

logger = logging.getLogger(__name__)

STOP_S = 3
"""Seconds between SIGTERM and SIGKILL."""
_RESTART_S = 0.2
"""Seconds before an ended process is started again."""
_PR_SET_PDEATHSIG = 1


class Worker(Router):
    """The router in one of several processes."""

    sockets: tuple[socket.socket, ...]
    """One on the common port, and one on its control port, where it answers for itself."""
    control_ports: tuple[int, ...]
    """Those of all processes."""

    async def _listen(self, host: str, port: int) -> list[asyncio.Server]:  # noqa: ARG002 - its sockets listen already
        loop = asyncio.get_running_loop()
        return [await loop.create_server(self.accept, sock=sock, backlog=BACKLOG) for sock in self.sockets]

    def _own_call(self, client: ClientConnection, request: RequestHead, path: bytes) -> Call:
        """RefusalError: 421 for a call that would reach one process of several."""
        ports = self.control_ports
        if path not in {b"/", HEALTH} and client.transport.get_extra_info("sockname")[1] not in ports:
            what = f"{len(ports)} processes serve this port, and {shown(path)[1:-1]} would reach one"
            each = ", ".join(map(str, ports))
            raise RefusalError(421, "several_processes", f"{what}; make the call on each control port: {each}")
        return AdminCall(client, request, self.dispatcher, ports)


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` sockets on one port (SO_REUSEPORT); the kernel spreads connections.

    They listen at once. A connection waits in the queue until its process accepts, also while that process restarts.
    ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A socket that does not share detects a taken port, also one taken by another router's processes.
        with socket.create_server((host, port), family=family) as alone:
            address = host, alone.getsockname()[1]
        listening = partial(socket.create_server, address, family=family, backlog=BACKLOG, reuse_port=True)
        return [listening() for _ in range(count)]
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def router_of_worker(
    config: RouterConfig, api_key: str | None, admin_key: str | None, ready: Callable[[str], None]
) -> Router:
    """Keep `config.workers` processes up until a signal; `ready` gets the open URL.

    It returns in each process, with its router. The calling process ends with SystemExit at SIGINT or SIGTERM.

    Raises:
        ConfigError: the address cannot be used, or other machines can reach it and there is no key.
    """
    refuse_open_host(config.host, api_key)
    listening = listen(config.host, config.port, config.workers)
    host, port = listening[0].getsockname()[:2]
    control = [listen(host, 0, 1)[0] for _ in listening]
    ready(base_url(host, port))
    index = _forked(config.workers)
    router = Worker(config, api_key=api_key, admin_key=admin_key, process=index)
    router.sockets = listening[index], control[index]
    router.control_ports = tuple(sock.getsockname()[1] for sock in control)
    return router


def _forked(count: int) -> int:
    """Fork `count` processes, replace those that end, and return in each its index."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    parent, workers = os.getpid(), dict[int, int]()
    missing = list(range(count))
    try:
        while True:
            while missing:
                try:
                    pid = os.fork()
                except OSError as error:  # no process is left; that may pass, and the other workers serve
                    logger.warning("router worker %d cannot be started yet: %s", missing[0], error)
                    time.sleep(_RESTART_S)
                    continue
                if not pid:
                    _end_with(parent)
                    return missing[0]
                workers[pid] = missing.pop(0)
            pid, status = os.wait()
            missing.append(index := workers.pop(pid))
            logger.warning("router worker %d ended with status %d", index, os.waitstatus_to_exitcode(status))
            time.sleep(_RESTART_S)
    finally:
        if os.getpid() == parent:
            _end(workers)


def _exit(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - the signal module's own signature
    sys.exit(0)


def _end_with(parent: int) -> None:
    """End this process with its parent, even if stopped: its socket keeps the port."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _end(workers: dict[int, int]) -> None:
    """End processes and wait for their end; answers under way break off."""

    def send(number: int) -> None:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal module's own signature
        send(signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(STOP_S)
    send(signal.SIGTERM)
    for pid in list(workers):
        os.waitpid(pid, 0)
