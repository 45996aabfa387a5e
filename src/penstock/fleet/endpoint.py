"""A fleet's control socket: another process of the same user reads its state and gives it orders.

HTTP with JSON over a unix socket that only its user can open. `GET /fleet?seen=N` answers as soon as the state is
another than change N, `GET /fleet/keys` with the keys of router and engines. `POST /fleet/METHOD` makes one of the
calls in `CALLS` and answers when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web

from penstock.config import ServerSpec, validate
from penstock.errors import PenstockError, StateError, UserError
from penstock.fleet.control_wire import FleetState, Keys, MemberState, error_to_json, fan_out_to_json, state_to_json
from penstock.fleet.elastic import Elastic
from penstock.fleet.operations import Operations
from penstock.fleet.roster import Roster
from penstock.fleet.settings import seconds, specs_of
from penstock.fleet.sockets import SOCKET_MODE, refuse_second, socket_of
from penstock.parsing import parse_json, reading
from penstock.types import PauseMode
from penstock.weights.manifest import WeightManifest

MAX_BODY = 64 * 2**20
"""A manifest of a 100k-tensor model is about 10 MB."""
SILENCE_S = 10.0
"""How long a question after changes is left without an answer; the asker learns from the answer that we live."""

_CHANGE = re.compile(r"-?[0-9]{1,18}")

STOPPED = "the fleet was told to stop, by `penstock fleet stop` or another program"

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[dict[str, Any]], Awaitable[Any]]


class Endpoint:
    """The socket of one fleet, which opens it, and closes it when everything else of it has ended.

    Args:
        url: of the fleet's router, whose port names the socket.
        roster: the engines.
        operations: what can be done with all of them.
        elastic: what can be done with their number.
        admin_key: of the router's admin calls.
    """

    def __init__(
        self, url: str, roster: Roster, operations: Operations, elastic: Elastic, *, admin_key: str | None = None
    ) -> None:
        self.detached = False
        """The fleet is nobody's child."""
        self.stopping = asyncio.Event()
        """Somebody wants the fleet to end; it does so by itself."""
        self._url = url
        self._admin_key = admin_key
        self._roster = roster
        self._operations = operations
        self._end: Callable[[], Awaitable[None]] | None = None
        self._ending: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._path: Path | None = None
        self._calls: dict[str, Call] = {
            "pause": lambda args: operations.pause(
                PauseMode(args["mode"]), clear_cache=bool(args["clear_cache"]), timeout_s=args["timeout_s"]
            ),
            "resume": lambda _: operations.resume(),
            "abort": lambda _: operations.abort(),
            "reset_prefix_cache": lambda _: operations.reset_prefix_cache(),
            "sleep": lambda args: operations.sleep(args["level"]),
            "wake_up": lambda args: operations.wake_up(args["tags"]),
            "collective_rpc": self._collective_rpc,
            "load_adapter": lambda args: operations.load_adapter(
                str(args["adapter"]), str(args["path"]), _timeout_s(args)
            ),
            "look": lambda _: elastic.look(),
            "init_weight_transfer": lambda args: operations.init_weight_transfer(args["init_info"]),
            "native_update": lambda args: operations.native_update(args["update_info"], args["version"]),
            "update": lambda args: operations.update_from(
                WeightManifest.from_json(args["manifest"]), kv=args.get("kv", "recompute")
            ),
            "add": lambda args: elastic.add(args["count"]),
            "attach": lambda args: elastic.attach(specs_of(validate(ServerSpec, s) for s in args["servers"])),
            "drain": lambda args: elastic.drain(args["engine"], args["timeout_s"]),
            "remove": lambda args: elastic.remove(args["engine"], args["timeout_s"]),
            "replace": lambda args: elastic.replace(args["engine"], args["timeout_s"]),
            "stop": self._stop,
        }

    async def open(self, end: Callable[[], Awaitable[None]]) -> None:
        """Listen. A router address that may be another machine's has no socket.

        Args:
            end: ends the fleet, this endpoint too; called where somebody wants that.

        Raises:
            StateError: another process holds the fleet behind this router.
            UserError: the folder of sockets is not safe.
        """
        self._end = end
        path = socket_of(self._url)
        if path is None:
            logger.info("a fleet at %s has no control socket: that may be another machine", self._url)
            return
        refuse_second(self._url)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/fleet", self._state_changed)
        app.router.add_get("/fleet/keys", self._keys)
        app.router.add_post("/fleet/{call}", self._called)
        # What is under way when a caller goes away is finished all the same, as operations are.
        runner = web.AppRunner(app, handler_cancellation=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()  # in the place of a socket that was left behind
            os.chmod(path, SOCKET_MODE)  # noqa: PTH101 - in a coroutine; it takes microseconds
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._path = runner, path

    async def close(self) -> None:
        """The fleet has ended: whoever asked for it is told, and nobody finds it any more."""
        self._ended.set()
        self._roster.announce()  # nobody need wait for a change any more
        if self._runner is not None and self._path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108 - in a coroutine; it takes microseconds
            await self._runner.cleanup()
            self._runner = None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns.

        Raises:
            StateError: somebody wanted the fleet to end; `work` was cancelled.
        """
        working = asyncio.create_task(work)
        told = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                raise StateError(STOPPED)
            return working.result()
        finally:
            told.cancel()
            working.cancel()
            await asyncio.wait((told, working))

    async def _collective_rpc(self, args: dict[str, Any]) -> dict[str, Any]:
        call = self._operations.collective_rpc
        return fan_out_to_json(
            await call(str(args["method"]), _timeout_s(args), list(args["args"]), dict(args["kwargs"]))
        )

    async def _stop(self, _: dict[str, Any]) -> None:
        self.stopping.set()
        if self._end is not None and self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await self._ended.wait()

    def _state(self) -> FleetState:
        members = tuple(
            MemberState(
                m.name, m.url, m.state, m.lifecycle.reason, m.weight_version, m.coming, tuple(m.gpus), m.info, m.warning
            )
            for m in self._roster.members
        )
        roster = self._roster
        kept = tuple(sorted(roster.kept))
        return FleetState(
            self._url, os.getpid(), self.detached, roster.version, roster.used, roster.changes, members, kept
        )

    async def _state_changed(self, http: web.Request) -> web.Response:
        seen = http.query.get("seen", "-1")
        if not _CHANGE.fullmatch(seen):
            return _answer({"error": error_to_json(UserError(f"seen must be an integer, got {seen[:80]!r}"))}, 400)
        await self._roster.until(
            lambda: self._roster.changes != int(seen) or self._ended.is_set(), deadline_s=SILENCE_S
        )
        if self._ended.is_set():
            return _answer({"error": error_to_json(StateError("this fleet was stopped"))}, 400)
        return _answer({"state": state_to_json(self._state())})

    async def _keys(self, _: web.Request) -> web.Response:
        keys = Keys(self._admin_key, {m.url: m.api_key for m in self._roster.members if m.api_key})
        return _answer({"result": asdict(keys), "state": state_to_json(self._state())})

    async def _called(self, http: web.Request) -> web.Response:
        name = http.match_info["call"]
        try:
            if self.stopping.is_set():
                raise StateError("this fleet is being stopped")
            call = self._calls.get(name)
            if call is None:
                raise UserError(f"there is no call {name!r}; known: {', '.join(self._calls)}")
            arguments = _arguments(name, await http.read())
            with reading(f"arguments of the call {name!r}"):
                result = await call(arguments)
        except PenstockError as error:
            return _answer({"error": error_to_json(error), "state": state_to_json(self._state())}, 400)
        if hasattr(result, "__dataclass_fields__"):
            result = asdict(result)
        return _answer({"result": result, "state": state_to_json(self._state())})


def _timeout_s(args: dict[str, Any]) -> float:
    if (given := seconds(args["timeout_s"])) is None:
        raise UserError("this call needs a timeout_s, in seconds")
    return given


def _arguments(name: str, body: bytes) -> dict[str, Any]:
    arguments: Any = parse_json(body or b"{}", f"the body of the call {name!r}")
    if not isinstance(arguments, dict):
        raise UserError(f"the call {name!r} takes a JSON object, got {type(arguments).__name__}")
    return arguments  # pyright: ignore[reportUnknownVariableType] - a JSON object


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
