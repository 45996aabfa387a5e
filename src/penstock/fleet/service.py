"""The control API of a fleet: its owner serves calls (`calls.py`) on a Unix socket, as `/control/CALL`.

Only the owner's user can reach the socket, so it needs no key and gives that user the keys of router and engines. The
router's port names the socket, which exists as long as the fleet has an owner.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import HttpUrl, TypeAdapter, ValidationError

from penstock.engine.capabilities import EngineInfo
from penstock.errors import EngineError, StateError, UserError
from penstock.fleet.adapters import FleetAdapters
from penstock.fleet.calls import Call, CallServer
from penstock.fleet.elastic import Elastic
from penstock.fleet.lifecycle import State
from penstock.fleet.native import NativeCalls
from penstock.fleet.pausing import AllOperations
from penstock.fleet.roster import Roster
from penstock.fleet.skyrl_paths import add_skyrl_paths
from penstock.options import without_password
from penstock.process import ChildProcess

FOLDER_ENV = "PENSTOCK_RUNTIME_DIR"
"""Variable that names a folder other than /tmp. XDG_RUNTIME_DIR and TMPDIR are not read: they differ between a user's
login and Slurm job, which then would not see each other's fleets. And logind removes the former at logout."""
FOLDER_MODE = 0o700
SOCKET_MODE = 0o600
LONGEST = 107
"""Most bytes in the name of a Unix socket on Linux."""
PREFIX = "/control"
QUIET_S = 5.0
"""Seconds without a change after which `state` is answered, so that its caller knows the owner is alive."""
SUCH_AS = "give one such as http://127.0.0.1:8000"
_ADDRESS = TypeAdapter(HttpUrl)

logger = logging.getLogger(__name__)


# --- where the socket lies -------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of this user's control sockets; create it if it is missing.

    Raises:
        UserError: other users could write there, its path is too long for a socket's name, or it cannot be created.
    """
    path = Path(os.environ.get(FOLDER_ENV) or "/tmp") / f"penstock-{os.getuid()}"  # noqa: S108 - its owner is checked
    if len(os.fsencode(path / "fleet-65535.sock")) > LONGEST:
        raise UserError(f"{path} is too long a path for a socket; set {FOLDER_ENV} to a shorter folder")
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}; {FOLDER_ENV} names the folder it lies in") from error
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(f"{path} must be a folder of this user that nobody else can enter; remove it, or chmod 700")
    return path


def router_address(url: str) -> str:
    """Return a router's address without a final slash or `/v1`. UserError: it is none."""
    try:
        given = _ADDRESS.validate_python(url)
    except ValidationError:
        raise UserError(f"{without_password(url)!r} is not an address; {SUCH_AS}") from None
    if given.username or given.password or given.query is not None or given.fragment is not None:
        raise UserError(f"a router's address has no user, query or fragment; {SUCH_AS}")
    return url.rstrip("/").removesuffix("/v1")


def socket_of(url: str) -> Path | None:
    """Return the control socket for a router at `url`; None: maybe another machine."""
    parts = urlsplit(router_address(url))
    return folder() / f"fleet-{parts.port}.sock" if _is_this_machine(parts.hostname) and parts.port else None


def _is_this_machine(host: str | None) -> bool:
    """Return whether an address is surely this machine's; only one name is, localhost."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def refuse_second(url: str | None) -> None:
    """Check before a start that the control socket of the router at `url` is free.

    Raises:
        UserError: the folder of sockets is not safe.
        StateError: another process owns the fleet behind that router.
    """
    path = folder() if url is None else socket_of(url)
    if url is not None and path is not None and alive(path):
        raise StateError(
            f"another process owns the fleet behind {url}, and two owners would give one version number to different "
            "weights; Fleet.connect adopts it, `penstock fleet stop` ends it and waits for that"
        )


def present() -> dict[int, Path]:
    """Return live fleets' control sockets by router port; remove those of killed ones."""
    return {int(path.stem.removeprefix("fleet-")): path for path in folder().glob("fleet-*.sock") if alive(path)}


def alive(path: Path) -> bool:
    """Return whether a process listens at a socket; remove a stale one."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # noqa: FBT003 - the module's own signature
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return False
        except OSError:  # its queue is full, so a process lives there
            pass
    return True


def _listen_at(path: Path) -> socket.socket:
    """Return a socket that listens at `path`. StateError: another process has just taken the path."""
    listening, new = socket.socket(socket.AF_UNIX), path.with_name(f"new.{os.getpid()}")
    try:
        # `alive` removes sockets that do not listen, so this one gets its final name afterwards.
        listening.bind(str(new))
        new.chmod(SOCKET_MODE)
        listening.listen()
        path.hardlink_to(new)
    except OSError as error:
        listening.close()
        raise StateError(f"cannot make the control socket {path}: {error}") from error
    finally:
        new.unlink(missing_ok=True)
    return listening


# --- what goes over it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberState:
    """One engine of a fleet, as other processes see it."""

    name: str
    url: str
    state: State
    reason: str
    weight_version: int
    is_restarting: bool
    """Whether it does not serve now but will."""
    gpus: tuple[str, ...]
    info: EngineInfo
    api_key: str | None = field(default=None, repr=False)
    """Key that it requires; never shown."""
    pid: int | None = None
    """Process id of its server while that runs, if this fleet launched it on this machine."""


@dataclass(frozen=True, slots=True)
class FleetState:
    """A fleet, as other processes see it."""

    url: str
    """URL of its router."""
    pid: int
    """Process id of its owner."""
    version: int
    """Weight version."""
    used: int
    """See `Roster.highest_version`."""
    change: int
    """Grows with each change."""
    drain_timeout_s: float
    members: tuple[MemberState, ...]
    starting: tuple[str, ...] = ()
    """Engines that start for the first time and are not yet members."""
    kept: tuple[int, ...] = ()
    """See `Roster.kv_kept_versions`."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of the router's admin calls and of requests; never shown. It is None if the router needs no key."""


_STATE = TypeAdapter(FleetState)


def state_of(data: Mapping[str, Any]) -> FleetState:
    """Read a state from the wire. EngineError, which shows no keys: it is malformed."""
    try:
        return _STATE.validate_python(data)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors(include_input=False))
        raise EngineError(f"the fleet's state cannot be read ({fields}); is it of another Penstock?") from None


def shown(state: FleetState) -> dict[str, Any]:
    """Return a state as JSON, without keys."""
    hidden = {"admin_key": True, "members": {"__all__": {"api_key"}}}
    return _STATE.dump_python(state, mode="json", exclude=hidden)


# --- the server ------------------------------------------------------------------------------------------------------


CALLS: Mapping[type, tuple[str, tuple[str, ...]]] = {
    AllOperations: (
        "",
        ("pause", "resume", "abort", "reset_prefix_cache", "sleep", "wake_up", "collective_rpc", "update_from"),
    ),
    NativeCalls: ("native_", ("init", "update")),
    FleetAdapters: ("adapter_", ("update_from", "load", "unload", "pause", "resume", "wait", "pin", "statuses")),
    Elastic: ("", ("add", "attach", "drain", "remove", "set_policy", "statuses", "stats", "losses")),
}
"""Methods that other processes can call, and the prefix of these calls.

Each takes and checks JSON values. `remote.Remote` reads results by their annotation.
"""


def _pid(process: object) -> int | None:
    return process.pid if isinstance(process, ChildProcess) and process.returncode is None else None


class Endpoint:
    """The control socket of one fleet, which opens it, and closes it after everything else has ended.

    The port in the router's `url` names the socket.
    """

    def __init__(
        self, url: str, roster: Roster, operations: AllOperations, elastic: Elastic, *, admin_key: str | None = None
    ) -> None:
        self.stopping = asyncio.Event()
        """Set when a call has asked the fleet to end."""
        self._url = url
        self._admin_key = admin_key
        self._roster = roster
        self._operations = operations
        self._elastic = elastic
        self._ending: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._opened = AsyncExitStack()

    async def open(self, end: Callable[[], Awaitable[None]]) -> None:
        """Listen, and let the call `stop` run `end`; with a remote router, only warn.

        Raises:
            StateError: another process owns the fleet behind this router.
            UserError: the folder of sockets is not safe.
        """
        path = socket_of(self._url)
        if path is None:
            logger.warning(
                "there is no control socket for %s, which may be another machine's address: no other process finds or "
                "adopts this fleet; with router.host 127.0.0.1 or 0.0.0.0 they do", self._url,
            )  # fmt: skip
            return
        refuse_second(self._url)
        operations, calls = self._operations, dict[str, Call]()
        for part in (operations, operations.native, operations.adapters, self._elastic):
            prefix, names = CALLS[type(part)]
            calls |= {f"{prefix}{name}": getattr(part, name) for name in names}
        calls |= {"state": self._state, "stop": partial(self._stop, end)}
        server = CallServer(PREFIX, calls)
        add_skyrl_paths(server.app, operations.adapters)
        listening = _listen_at(path)
        self._opened.push_async_callback(server.close)
        self._opened.callback(path.unlink, missing_ok=True)
        await server.start(listening)

    async def close(self) -> None:
        """Answer `stop` and `state` after the fleet's end, and remove the socket."""
        self._ended.set()
        self._roster.notify_all()  # wakes `state`
        await self._opened.aclose()

    async def _stop(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._ending is None:
            self.stopping.set()
            self._ending = asyncio.ensure_future(end())
        await self._ended.wait()

    async def _state(self, seen: int = -1) -> FleetState:
        """Return the state once it differs from that of change `seen`, or after `QUIET_S`."""
        roster = self._roster
        await roster.until(lambda: roster.changes != seen or self._ended.is_set(), deadline_s=QUIET_S)
        if self._ended.is_set():
            raise StateError("this fleet was stopped")
        return FleetState(
            url=self._url,
            pid=os.getpid(),
            version=roster.version,
            used=roster.highest_version,
            change=roster.changes,
            drain_timeout_s=self._elastic.drain_timeout_s,
            members=tuple(
                MemberState(
                    m.name, m.url, m.state, m.lifecycle.reason, m.weight_version, m.is_restarting, m.gpus, m.info,
                    m.api_key, _pid(m.process),
                )
                for m in roster.members
            ),
            starting=self._elastic.starting,
            kept=tuple(sorted(roster.kv_kept_versions)),
            admin_key=self._admin_key,
        )  # fmt: skip
