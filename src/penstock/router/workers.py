"""Several processes that serve one port as one router; this process forks them and replaces those that end.

Each has its own listening socket on the port, and its own control port. The kernel spreads connections over the
former. Each process knows its own sessions and load. The owner of the fleet announces engines, gate and policy to
every process (`admin_client.py`). Until then, a process holds its requests.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from penstock.errors import ConfigError
from penstock.router.server import BACKLOG, Router, base_url, open_socket
from penstock.router_settings import LAST_PORT, RouterConfig, refuse_open_host

logger = logging.getLogger(__name__)

_RESTART_S = 0.2
"""Seconds before an ended process is started again."""
_ENDS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` sockets on one port (SO_REUSEPORT); the kernel spreads connections.

    They listen at once. A connection waits in the queue until its process accepts, also while that process restarts.
    ConfigError: the address cannot be used.
    """
    # A socket that does not share detects a taken port, also one taken by another router's processes.
    with open_socket(host, port, "router.port") as alone:
        port = alone.getsockname()[1]
    return [open_socket(host, port, "router.port", backlog=BACKLOG, shared=True) for _ in range(count)]


def router_of_worker(
    config: RouterConfig, api_key: str | None, admin_key: str | None, ready: Callable[[str], None]
) -> Router:
    """Keep `config.workers` processes up until a signal; `ready` gets the open URL.

    It returns in each process, with its router. The calling process ends with SystemExit at SIGINT or SIGTERM.

    Raises:
        ConfigError: an address cannot be used, or other machines can reach it and there is no key.
    """
    refuse_open_host(config.host, api_key)
    listening = listen(config.host, config.port, config.workers)
    host, port = listening[0].getsockname()[:2]
    first, last = config.control_port, config.control_port + config.workers - 1
    if last > LAST_PORT:
        raise ConfigError(f"router.control_port {first} is too high: {config.workers} workers take the ports to {last}")
    control = [open_socket(host, first and first + index, "router.control_port") for index in range(config.workers)]
    ready(base_url(host, port))
    index = _forked(config.workers)
    sockets = listening[index], control[index]
    router = Router(config, api_key=api_key, admin_key=admin_key, process=index, sockets=sockets)
    router.control_ports = tuple(sock.getsockname()[1] for sock in control)
    return router


def _forked(count: int) -> int:
    """Fork `count` processes, replace those that end, and return in each its index."""
    for number in _ENDS:
        signal.signal(number, lambda _number, _frame: sys.exit(0))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    # Each signal writes a byte. So a read of it also ends for one that comes just before, unlike `os.wait`.
    came, comes = socket.socketpair()
    comes.settimeout(0.0)
    signal.set_wakeup_fd(comes.fileno())
    parent, workers = os.getpid(), dict[int, int]()
    missing = list(range(count))
    try:
        while True:
            while missing:
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)  # Python drops the handler's exit within a fork
                try:
                    pid = os.fork()
                    if not pid:
                        _end_with(parent)
                        return missing[0]
                    workers[pid] = missing.pop(0)
                except OSError as error:  # no process is left; that may pass, and the other workers serve
                    logger.warning("router worker %d cannot be started yet: %s", missing[0], error)
                    time.sleep(_RESTART_S)
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                came.recv(1)
                continue
            missing.append(index := workers.pop(pid))
            logger.warning("router worker %d ended with status %d", index, os.waitstatus_to_exitcode(status))
            time.sleep(_RESTART_S)
    finally:
        if os.getpid() == parent:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)  # answers under way break off, as at the end of one process
            for pid in workers:
                os.waitpid(pid, 0)  # the port is free when this process has ended


def _end_with(parent: int) -> None:
    """End this process with its parent, even if stopped: its socket keeps the port."""
    signal.set_wakeup_fd(-1)
    for number in (*_ENDS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
