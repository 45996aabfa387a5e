"""Several processes that serve one port as one router: this process starts them, and starts again those that end.

Each has a listening socket of its own on the port, over which the kernel spreads connections, and one on a control port
of its own. Each knows its own sessions and load. The owner of the fleet tells every process its engines, gate and
policy (`admin_client.py`); a process that has not been told yet holds what it gets.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import orjson

from penstock.errors import EngineStartError
from penstock.process import LIFELINE_ENV, backoff_s, read_report
from penstock.router.admin_client import RouterAdmin
from penstock.router.http import RefusalError
from penstock.router.server import BACKLOG, JSON, PROMETHEUS, Answer, Router, base_url, cannot_listen, finished_session
from penstock.settings import RouterConfig, refuse_open_host

logger = logging.getLogger(__name__)

START_S = 20.0
"""Deadline of a worker's start, which takes a fraction of a second on an idle machine."""
STOP_S = 3.0
"""Between SIGTERM and SIGKILL."""
STEADY_S = 60.0
"""A worker that has served for so long is well: should it end, the wait before its restart is short again."""
CALL_S = 5.0
"""Deadline of a call to the other processes; one that is started again answers within a second."""
_PR_SET_PDEATHSIG = 1
Keys = tuple[str | None, str | None]
"""What clients have to send, and what with calls that change the router."""


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Open `count` sockets that share `host` and `port` (SO_REUSEPORT); the kernel spreads connections over them.

    They listen already: a connection that comes before its process accepts, or while that process is started again,
    waits in the queue. ConfigError: the address cannot be used.
    """
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # A socket that does not share finds out whether the port is taken, by another router's processes too.
            with socket.socket(family, kind, protocol) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(address)
                address = (address[0], alone.getsockname()[1], *address[2:])
            sockets = [opened.enter_context(socket.socket(family, kind, protocol)) for _ in range(count)]
            for one in sockets:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind(address)
            for one in sockets:
                one.listen(BACKLOG)
                one.setblocking(False)  # noqa: FBT003 - the socket's own signature
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        opened.pop_all()
        return sockets


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which worker a process is, and the sockets that it inherits; goes on its command line."""

    index: int
    listening: int
    """File descriptor of its socket on the shared port."""
    control: int
    """File descriptor of the socket on its own control port."""
    control_ports: tuple[int, ...]
    """Those of all workers."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`."""
        values: dict[str, Any] = orjson.loads(text)
        values["control_ports"] = tuple(values["control_ports"])
        return cls(**values)

    def __str__(self) -> str:
        return orjson.dumps(asdict(self)).decode()


class Worker:
    """One of several processes, with a server on its own control port besides the one on their common port."""

    def __init__(self, config: RouterConfig, keys: Keys, place: WorkerPlace) -> None:
        self._router = Router(config, api_key=keys[0], admin_key=keys[1], process=place.index)
        self._place = place
        self._api_key = keys[0]
        self._control: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return self._router.url

    async def start(self) -> None:
        # Also where it is stopped, and could not follow its lifeline: its socket would keep the port.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        place, router = self._place, self._router
        control = socket.socket(fileno=place.control)
        host, port = control.getsockname()[:2]
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
        share_port(router, host, port, place.control_ports, self._api_key)
        await router.start(sock=socket.socket(fileno=place.listening))
        self._control = await asyncio.get_running_loop().create_server(router.accept, sock=control)

    async def close(self) -> None:
        await self._router.close()


def share_port(router: Router, host: str, port: int, control_ports: tuple[int, ...], api_key: str | None) -> None:
    """Have admin calls by the common port answered for all processes, or refused with the reason.

    `host` and `port` are this process's control port, where it answers for itself; each asks for `api_key`.
    """

    def answer_for_all(transport: asyncio.Transport, method: str, path: str, body: bytes) -> Awaitable[Answer] | None:
        if transport.get_extra_info("sockname")[1] == port:
            return None
        match method, path:
            case "GET", "/router/engines" | "/router/metrics" | "/metrics":
                return _ask_all(base_url(host, port), api_key, path, "")
            case "POST", "/router/sessions/finish":
                return _ask_all(base_url(host, port), api_key, path, finished_session(body))
            case "PUT", "/router/engines":
                ports = ", ".join(map(str, control_ports))
                what = f"{len(control_ports)} processes serve this port, and {method} {path} would reach one"
                raise RefusalError(421, "several_processes", f"{what}; make the call on each control port: {ports}")
            case _:
                return None

    router.admin.control_ports = control_ports
    router.admin.answer_for_all = answer_for_all


async def _ask_all(url: str, api_key: str | None, path: str, session: str) -> Answer:
    """PenstockError: another process does not answer."""
    everyone = RouterAdmin(url, api_key, timeout_s=CALL_S)
    try:
        if path == "/router/engines":
            return orjson.dumps(await everyone.state()), JSON
        if session:
            return orjson.dumps({"finished": await everyone.finish_session(session)}), JSON
        return (await everyone.metrics()).encode(), PROMETHEUS
    finally:
        await everyone.close()


class Workers:
    """The processes of a router of `config.workers` of them; they are started with this process's own `arguments`."""

    def __init__(self, config: RouterConfig, api_key: str | None, arguments: Sequence[str]) -> None:
        self.config = config
        self.url = ""
        self._api_key = api_key
        self._arguments = arguments
        self._listening: list[socket.socket] = []
        self._control: list[socket.socket] = []
        self._lifeline = os.pipe()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers; returns when they serve.

        Raises:
            ConfigError: the address cannot be used, or other machines can reach it and there is no key.
            EngineStartError: a worker does not start.
        """
        refuse_open_host(self.config.host, self._api_key)
        count = self.config.workers
        self._listening = listen(self.config.host, self.config.port, count)
        host, port = self._listening[0].getsockname()[:2]
        self._control = [listen(host, 0, 1)[0] for _ in range(count)]
        ready = [asyncio.get_running_loop().create_future() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._keep(index, future)) for index, future in enumerate(ready)]
        most_s = START_S + 3 * STOP_S  # the report, and the end of a worker that gave none
        try:
            async with asyncio.timeout(most_s):
                await asyncio.gather(*ready)
        except TimeoutError:
            raise EngineStartError(f"the router's workers have not started within {most_s:g} s") from None
        self.url = base_url(host, port)

    async def close(self) -> None:
        """End all workers; answers under way end as broken transfers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in (*self._listening, *self._control):
            sock.close()
        for fd in self._lifeline:
            os.close(fd)

    async def _keep(self, index: int, ready: asyncio.Future[None]) -> None:
        """Have a worker run in this place until we are cancelled."""
        clock, failures = asyncio.get_running_loop().time, 0
        while True:
            began = clock()
            try:
                reason = await self._run(index, ready)
            except OSError as error:  # no process, or no pipe, to be had
                reason = f"could not be started: {error}"
            if not ready.done():
                ready.set_exception(EngineStartError(f"router worker {index} {reason}"))
                return
            failures = 0 if clock() - began >= STEADY_S else failures
            wait_s = backoff_s(failures)
            logger.warning("router worker %d %s; it is started again in %g s", index, reason, wait_s)
            failures += 1
            await asyncio.sleep(wait_s)

    async def _run(self, index: int, ready: asyncio.Future[None]) -> str:
        """One life of a worker; returns how it ended."""
        read_fd, write_fd = os.pipe()
        with ExitStack() as undo:
            undo.callback(os.close, read_fd)
            try:
                process = await self._spawn(index, write_fd)
            finally:
                os.close(write_fd)
            undo.pop_all()
        try:
            report = await read_report(read_fd, START_S)
            if "url" not in report:
                await _end(process, patience_s=STOP_S)  # it is ending by itself: its status is the reason
                error = report.get("error")
                return error["message"] if error else f"ended with status {process.returncode} as it started"
            if not ready.done():
                ready.set_result(None)
            return f"ended with status {await process.wait()}"
        except EngineStartError as error:
            return str(error)
        finally:
            await _end(process)

    async def _spawn(self, index: int, ready_fd: int) -> asyncio.subprocess.Process:
        listening, control = self._listening[index].fileno(), self._control[index].fileno()
        ports = tuple(sock.getsockname()[1] for sock in self._control)
        place = WorkerPlace(index, listening, control, ports)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.router", *self._arguments,
            "--ready-fd", str(ready_fd), "--worker", str(place),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**os.environ, LIFELINE_ENV: str(self._lifeline[0])},
            pass_fds=(listening, control, ready_fd, self._lifeline[0]),
            start_new_session=True,
        )  # fmt: skip


def of_arguments(config: RouterConfig, keys: Keys, arguments: Sequence[str], place: str | None) -> Workers | Worker:
    """Make the parent of several processes, or the one process that `--worker` names."""
    return Workers(config, keys[0], arguments) if place is None else Worker(config, keys, WorkerPlace.parse(place))


async def _end(process: asyncio.subprocess.Process, patience_s: float = 0.0) -> None:
    """End a worker, if it has not ended by itself within `patience_s`."""
    if patience_s:
        # A signal to a process that is ending reaps it behind asyncio's back, which then reports status 255.
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
