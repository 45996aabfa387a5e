"""Several processes that serve one port as one router: this process forks them, and forks again those that end.

Each has a listening socket of its own on the port, over which the kernel spreads connections, and one on a control port
of its own. Each knows its own sessions and load. The owner of the fleet tells every process its engines, gate and
policy (`admin_client.py`); a process that has not been told yet holds what it gets.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from penstock.router.server import BACKLOG, Router, base_url, cannot_listen
from penstock.router.state import EngineLoad, RouterState
from penstock.settings import RouterConfig, refuse_open_host

logger = logging.getLogger(__name__)

STOP_S = 3
"""Between SIGTERM and SIGKILL."""
_RESTART_S = 0.2
"""Before a process that ended is started again."""
_PR_SET_PDEATHSIG = 1


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` sockets that share `host` and `port` (SO_REUSEPORT); the kernel spreads connections over them.

    They listen already: a connection that comes before its process accepts, or while that process is started again,
    waits in the queue. ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A socket that does not share finds out whether the port is taken, by another router's processes too.
        with socket.create_server((host, port), family=family) as alone:
            address = host, alone.getsockname()[1]
        listening = partial(socket.create_server, address, family=family, backlog=BACKLOG, reuse_port=True)
        return [listening() for _ in range(count)]
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def router_of_worker(
    config: RouterConfig, api_key: str | None, admin_key: str | None, ready: Callable[[str], None]
) -> Router:
    """Keep `config.workers` processes up until SIGINT or SIGTERM; `ready` gets the URL once the port can be called.

    Returns in each of those processes, with the router that it is to serve. This process ends with SystemExit.

    Raises:
        ConfigError: the address cannot be used, or other machines can reach it and there is no key.
    """
    refuse_open_host(config.host, api_key)
    listening = listen(config.host, config.port, config.workers)
    host, port = listening[0].getsockname()[:2]
    control = [listen(host, 0, 1)[0] for _ in listening]
    ready(base_url(host, port))
    index = _forked(config.workers)
    return Router(
        config, api_key=api_key, admin_key=admin_key, process=index, sockets=(listening[index], control[index]),
        control_ports=tuple(sock.getsockname()[1] for sock in control),
    )  # fmt: skip


def _forked(count: int) -> int:
    """Return in each of `count` processes which one it is; those that end are forked again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    parent, workers = os.getpid(), dict[int, int]()
    missing = list(range(count))
    try:
        while True:
            while missing:
                if not (pid := os.fork()):
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
    """End this process with its parent, also where it is stopped: its socket would keep the port."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before that
        os.kill(os.getpid(), signal.SIGKILL)


def _end(workers: dict[int, int]) -> None:
    """End processes, and wait for that; answers under way end as broken transfers."""

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


# --- their state as one ----------------------------------------------------------------------------------------------

_SUMMED = ("held", "held_bytes", "sessions", "requests", "moved_sessions")
_ENGINE_SUMMED = (
    "outstanding",
    "outstanding_tokens",
    "resident_tokens",
    "sessions",
    "requests",
    "breaker_openings",
    "dead_answers",
)
_ENGINE_GREATEST = ("down", "kv_usage", "kv_capacity", "failure")


def merged(states: Sequence[RouterState]) -> RouterState:
    """Make one state of those of several processes, at least one. Engines are those of the process told last.

    A session counts in each process that had a turn of it. A gate is closed, and an engine down, if it is for one.
    """
    newest = max(states, key=lambda state: state.epoch)
    engines = [engine for state in states for engine in state.engines]
    return replace(
        newest,
        workers=tuple(pid for state in states for pid in state.workers),
        counted_since=max(state.counted_since for state in states),
        in_step=all(state.epoch == newest.epoch for state in states),
        gate_closed=any(state.gate_closed for state in states),
        held_by=_total(state.held_by for state in states),
        placements=_total(state.placements for state in states),
        engines=tuple(_merged(load, [one for one in engines if one.name == load.name]) for load in newest.engines),
        **{name: sum(getattr(state, name) for state in states) for name in _SUMMED},
    )


def _total(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)


def _merged(load: EngineLoad, of: Sequence[EngineLoad]) -> EngineLoad:
    figures: dict[str, Any] = {name: sum(getattr(one, name) for one in of) for name in _ENGINE_SUMMED}
    figures |= {name: max(getattr(one, name) for one in of) for name in _ENGINE_GREATEST}
    return replace(load, drained=all(one.drained for one in of), **figures)
