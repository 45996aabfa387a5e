"""Where a fleet's control socket lies: one for each router port, in a folder that only its user can enter.

HTTP with JSON over a unix socket that only its user can open. `GET /fleet?seen=N` answers as soon as the state is
another than change N, `GET /fleet/keys` with the keys of router and engines. `POST /fleet/METHOD` makes one of the
calls in `CALLS` and answers when it is done.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from penstock import errors
from penstock.config import ServerSpec, validate
from penstock.engine.control import EngineInfo
from penstock.errors import DeadlineError, EngineError, EngineHTTPError, PenstockError, StateError, UserError
from penstock.fleet.elastic import Elastic
from penstock.fleet.fan_out import FanOut
from penstock.fleet.member import State
from penstock.fleet.operations import Operations
from penstock.fleet.options import seconds, specs_of
from penstock.fleet.roster import Roster
from penstock.parsing import parse_json, reading
from penstock.types import PauseMode, UpdateReport
from penstock.weights.manifest import WeightManifest

FOLDER_ENV = "PENSTOCK_RUNTIME_DIR"
"""Names a folder other than /tmp. Neither XDG_RUNTIME_DIR nor TMPDIR is asked: a login and a cron or Slurm job of one
user differ in them, so one would not see that the other holds a fleet, and logind takes the former away at logout."""
FOLDER_MODE = 0o700
SOCKET_MODE = 0o600
LONGEST = 107
"""Bytes in the name of a unix socket, on Linux."""
ASK_THERE = "as the user who holds the fleet, on the router's machine: its control socket gives what is needed"
"""How somebody gets at engines that are not to be asked from here."""
_NAME = re.compile(r"fleet-(\d+)\.sock")


def folder() -> Path:
    """The folder of this user's sockets; made where it is not there.

    Raises:
        UserError: somebody else could write there, its path is too long for a socket's name, or it cannot be made.
    """
    path = Path(os.environ.get(FOLDER_ENV) or "/tmp") / f"penstock-{os.getuid()}"  # noqa: S108 - who made it is checked
    if len(os.fsencode(path / "fleet-65535.sock")) > LONGEST:
        raise UserError(f"{path} is too long a path for a socket; set {FOLDER_ENV} to a shorter folder")
    try:
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}; {FOLDER_ENV} names the folder it lies in") from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{path} must be a folder of this user that nobody else can enter; remove it, or chmod 700")
    return path


def router_address(url: str) -> str:
    """The address of a router as it was given, without a slash or the `/v1` of OpenAI clients at its end.

    Raises:
        UserError: it is none.
    """
    try:
        parts = urlsplit(url)
        complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        complete = False
    if not complete:
        raise UserError(f"{url!r} is not an address; give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def socket_of(url: str) -> Path | None:
    """The control socket that a fleet behind the router at `url` would have; None where that is another machine.

    Raises:
        UserError: it is no address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is no address ({error}); give one such as http://127.0.0.1:8000") from error
    return folder() / f"fleet-{port}.sock" if _is_here(parts.hostname) and port else None


def beyond_reach(router_url: str, engine_url: str) -> bool:
    """Whether an engine listens only on the machine of a router that may be another than this one.

    Its address means something else here: whoever holds that port of this machine would get the caller's key.
    """
    return _is_here(urlsplit(engine_url).hostname) and not _is_here(urlsplit(router_url).hostname)


def _is_here(host: str | None) -> bool:
    """Whether an address can only be this machine's; a name but localhost may be any machine's."""
    host = (host or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host if ":" in host else socket.inet_aton(host))  # 127.1 is 127.0.0.1
    except (ValueError, OSError):
        return host == "localhost"
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def refuse_second(url: str | None) -> None:
    """Say before anything starts what would keep a fleet from having the control socket of the router at `url`.

    Raises:
        UserError: the folder of sockets is not safe.
        StateError: somebody holds the fleet behind that router.
    """
    path = folder() if url is None else socket_of(url)
    if url is not None and path is not None and alive(path):
        raise StateError(
            f"the fleet behind {url} is held already, and two that update the same engines give one version number to "
            "different weights; Fleet.connect adopts it, `penstock fleet stop` ends it"
        )


def present() -> dict[int, Path]:
    """Router port to control socket, of every fleet that lives; the sockets of those that were killed go away."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder().iterdir())
    return {int(match[1]): path for match, path in named if match is not None and alive(path)}


def alive(path: Path) -> bool:
    """Whether somebody listens at a socket; one that was left behind goes away."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # noqa: FBT003 - the module's own signature
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return False
        except OSError:  # its queue is full: somebody lives there
            pass
    return True


@dataclass(frozen=True, slots=True)
class MemberState:
    """One engine of a fleet, as another process sees it."""

    name: str
    url: str
    state: State
    reason: str
    weight_version: int
    coming: bool
    """It does not serve, and will."""
    gpus: tuple[str, ...]
    info: EngineInfo
    warning: str = ""
    """See `Member.warning`."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """A fleet, as another process sees it."""

    url: str
    """Of its router."""
    pid: int
    """The process that holds it."""
    detached: bool
    version: int
    """Weight version."""
    used: int
    """See `Roster.used`."""
    change: int
    """Grows with each change."""
    members: tuple[MemberState, ...]
    kept: tuple[int, ...] = ()
    """See `Roster.kept`."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a process of the fleet's user needs for speaking to router and engines itself. Never shown or kept."""

    admin: str | None = field(repr=False)
    """Of the router's admin calls; it is good for requests too. None: none is asked for."""
    engines: Mapping[str, str] = field(repr=False)
    """By the engine's URL; one that is not here asks for none."""


_STATE = TypeAdapter(FleetState)
_REPORT = TypeAdapter(UpdateReport)
_KEYS = TypeAdapter(Keys)


def state_to_json(state: FleetState) -> dict[str, Any]:
    """As it goes over the socket."""
    return _STATE.dump_python(state, mode="json")


def state_of(data: Mapping[str, Any]) -> FleetState:
    """Read what `state_to_json` wrote. Raises EngineError where it is something else."""
    try:
        return _STATE.validate_python(data)
    except ValidationError as error:
        raise EngineError(f"the fleet's state cannot be read; is it of another Penstock? {error}") from error


def keys_of(data: Mapping[str, Any]) -> Keys:
    """The keys from their `dataclasses.asdict`. Raises EngineError, which does not show them, for something else."""
    try:
        return _KEYS.validate_python(data)
    except ValidationError:
        raise EngineError("the fleet's keys cannot be read; is it of another Penstock?") from None


def report_of(data: Mapping[str, Any]) -> UpdateReport:
    """An `UpdateReport` from its `dataclasses.asdict`. Raises EngineError where it is something else."""
    with reading("report of an update", EngineError):
        return _REPORT.validate_python(data)


def fan_out_to_json(outcome: FanOut[Any]) -> dict[str, Any]:
    """What each engine answered, as it goes over the socket; the answers are JSON already."""
    failures = {name: error_to_json(error) for name, error in outcome.failures.items()}
    return {"results": dict(outcome.results), "failures": failures}


def fan_out_of(data: Mapping[str, Any]) -> FanOut[Any]:
    """What `fan_out_to_json` wrote."""
    return FanOut(data["results"], {name: error_of(error) for name, error in data["failures"].items()})


def error_to_json(error: PenstockError) -> dict[str, Any]:
    """The error's class, message, and what else it holds."""
    more = {name: getattr(error, name) for name in ("status", "error_type", "seconds") if hasattr(error, name)}
    return {"type": type(error).__name__, "message": str(error), **more}


def error_of(data: Mapping[str, Any]) -> PenstockError:
    """The error that `error_to_json` described, of its own class."""
    message = str(data.get("message", data))
    found = getattr(errors, str(data.get("type")), None)
    if not (isinstance(found, type) and issubclass(found, PenstockError)):
        return PenstockError(message)
    if issubclass(found, EngineHTTPError):
        return found(message, status=int(data["status"]), error_type=str(data["error_type"]))
    if issubclass(found, DeadlineError):
        return found(message, seconds=float(data["seconds"]))
    return found(message)


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
