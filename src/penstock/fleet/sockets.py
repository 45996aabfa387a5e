"""Where a fleet's control socket lies: one for each router port, in a folder that only its user can enter."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import StateError, UserError

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
