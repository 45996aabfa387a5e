"""One of several processes of a router: `python -m penstock.router.worker PLACE`, started by the hub alone."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import orjson
import uvloop

from penstock.config import RouterConfig, validate
from penstock.process import raise_file_limit, watch_lifeline
from penstock.router.admin_calls import Answer, execute
from penstock.router.control_channel import ControlChannel
from penstock.router.doorbell import Doorbell
from penstock.router.engine_watch import KVFigures
from penstock.router.malloc import keep_freed_memory
from penstock.router.merge import to_plain
from penstock.router.report import families
from penstock.router.server import Router
from penstock.router.shared_loads import SharedLoads
from penstock.router.shared_sessions import SharedSessions
from penstock.router.shared_state import SharedState
from penstock.router.worker_process import WorkerPlace

RELAY_S = 9.0
"""Deadline of what is relayed to the hub; a client of the admin endpoints waits for 10 s."""
_RELAYED = {
    ("PUT", "/router/engines"),
    ("GET", "/router/engines"),
    ("POST", "/router/gate"),
    ("PUT", "/router/policy"),
    ("GET", "/router/metrics"),
    ("GET", "/metrics"),
}
"""What concerns all workers. A finished session is finished for all, since the table is theirs together."""


class Worker:
    """Serves what comes on one of the port's sockets, and does what the hub says.

    Args:
        place: what it inherited.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        shared = SharedState(place.memory, place.layout)
        self._bell = Doorbell(shared, place.bells, place.process)
        self._loads = SharedLoads(shared, place.process, self._bell)
        self._sessions = SharedSessions(shared, self._loads)
        self._router: Router | None = None
        self._hub: ControlChannel | None = None
        self._heard_of = ""
        """The engine of which another worker says just now that it is down: no news to pass on."""

    async def run(self) -> None:
        """Serve until SIGTERM, or until the hub is gone."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        hub = self._hub = await ControlChannel.open("router hub", socket.socket(fileno=self._place.control), self._do)
        ended = [asyncio.create_task(stop.wait()), asyncio.create_task(hub.ended())]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        if self._router is not None:
            await self._router.close()
        await hub.close()

    async def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the hub says; it is in force when it is answered."""
        answer: dict[str, Any] = {}
        match message:
            case {"do": "ping"}:
                pass
            case {"do": "prepare", **given}:
                self._prepare(given["config"], given["api_key"], given["admin_key"])
            case {"do": "serve"}:
                await self._serving.start(sock=socket.socket(fileno=self._place.listening))
                asyncio.get_running_loop().add_reader(self._bell.fd, self._rung)
            case {"do": "engines", "homes": homes, "slots": slots, "lost": lost, "body": body}:
                self._loads.set_engines(slots, lost)
                self._sessions.set_engines(homes)
                answer = self._execute("PUT", "/router/engines", body)
            case {"do": "execute", "method": method, "path": path, "body": body}:
                answer = self._execute(method, path, body)
            case {"do": "hear", "engine": engine, **news}:
                if engine in self._serving.dispatcher.engines:
                    self._hear(engine, news)
            case {"do": "families"}:
                self._loads.look()
                answer = {"families": to_plain(families(self._serving.dispatcher))}
            case _:
                raise ValueError(f"the hub said {message!r}")
        return answer

    def _hear(self, engine: str, news: Mapping[str, Any]) -> None:
        """What another worker has learnt of an engine of the set."""
        dispatcher = self._serving.dispatcher
        if "figures" in news:
            dispatcher.figures(engine, KVFigures(*news["figures"]))
        else:
            self._heard_of = engine
            dispatcher.engine_refused(dispatcher.engines[engine])
            self._heard_of = ""

    def _prepare(self, given: Mapping[str, Any], api_key: str | None, admin_key: str | None) -> None:
        config = validate(RouterConfig, given)
        if config.access_log:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        router = Router(
            config,
            api_key=api_key,
            admin_key=admin_key,
            sessions=self._sessions,
            loads=self._loads,
            reads_figures=self._place.process == 0,
        )
        router.dispatcher.relay = self._relay
        router.dispatcher.on_wait = self._wait_for_room
        router.dispatcher.on_figures = self._tell_figures
        router.dispatcher.on_down = self._tell_down
        self._router = router

    @property
    def _serving(self) -> Router:
        if self._router is None:
            raise ValueError("the hub has not said yet how to serve")
        return self._router

    def _execute(self, method: str, path: str, body: str) -> dict[str, Any]:
        self._loads.look()
        content, _ = execute(self._serving.dispatcher, method, path, body.encode())
        return orjson.loads(content)

    async def _relay(self, method: str, path: str, body: bytes) -> Answer:
        dispatcher = self._serving.dispatcher
        if (method, path) not in _RELAYED or self._hub is None:
            return execute(dispatcher, method, path, body)
        message = {"do": "admin", "method": method, "path": path, "body": body.decode(errors="replace")}
        answer = await self._hub.call(message, deadline_s=RELAY_S)
        return answer["content"].encode(), answer["type"]

    def _tell_figures(self, engine: str, figures: KVFigures) -> None:
        self._tell(engine, {"figures": [*figures]})

    def _tell_down(self, engine: str) -> None:
        if engine != self._heard_of:
            self._tell(engine, {})

    def _tell(self, engine: str, news: Mapping[str, Any]) -> None:
        if self._hub is not None:
            self._hub.tell({"do": "hear", "from": self._place.process, "engine": engine, **news})

    def _wait_for_room(self) -> None:
        if self._bell.listen():  # load may have fallen since we looked, by one who saw nobody listen
            asyncio.get_running_loop().call_soon(self._look_for_room)

    def _look_for_room(self) -> None:
        self._loads.look()
        self._serving.dispatcher.gate.room()

    def _rung(self) -> None:
        self._bell.answer()
        self._look_for_room()


def main() -> None:
    """Run until the hub says that it is enough, or ends."""
    watch_lifeline()
    raise_file_limit()
    keep_freed_memory()
    worker = Worker(WorkerPlace.of(sys.argv[1]))
    uvloop.run(worker.run())


if __name__ == "__main__":
    main()
