"""The end of a process group: by its lifeline, with its shared memory and its folder.

A child holds the read end of a pipe from its launcher, the lifeline. When the launcher is gone, the pipe ends, and the
child ends its whole group.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

SCRATCH_ENV = "PENSTOCK_SCRATCH"
"""Environment variable that names a folder of a process group, which is removed with the group."""
_SHARED = Path("/dev/shm")  # noqa: S108 - where names of shared memory are
_OWN = ("psm_", "sem.mp-", "vllm_dist_", "nccl-")
"""Prefixes of names from Python, vLLM and NCCL. Other mapped memory may belong to a trainer."""
_MAPPED = re.compile(rf"(\w+):(\w+) (\d+) +{_SHARED}/")
"""Device and inode. The name beside them may be outdated: glibc creates a semaphore under one name and renames it."""


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return these processes' mapped shared memory whose name begins as in `_OWN`."""
    mapped: set[tuple[int, int]] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended in between
            maps = _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())
            mapped |= {(os.makedev(int(major, 16), int(minor, 16)), int(inode)) for major, minor, inode in maps}
    found: set[Path] = set()
    for name in _SHARED.iterdir() if mapped else ():
        with suppress(FileNotFoundError):  # unlinked in between
            there = name.stat(follow_symlinks=False)
            if name.name.startswith(_OWN) and (there.st_dev, there.st_ino) in mapped:
                found.add(name)
    return found


def remove_leftovers(names: Iterable[Path], scratch: Path | None) -> None:
    """Unlink remaining `names`, and the folder `scratch`, after their processes' end."""
    for name in names:
        name.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


LIFELINE_ENV = "PENSTOCK_LIFELINE_FD"
"""Environment variable for the descriptor number of the read end."""
TRACKER = b"multiprocessing.resource_tracker"
PARENT, GROUP = 1, 2  # positions in /proc/PID/stat


def watch_lifeline(at_end: Callable[[], object] = bool) -> None:
    """End this process group when the launcher is gone, after `at_end`.

    A child calls it first. It has no effect without the variable (a server that a person started).
    """
    fd_text = os.environ.pop(LIFELINE_ENV, None)
    if fd_text is None:
        return
    fd = int(fd_text)
    os.set_inheritable(fd, False)  # noqa: FBT003 - the os module's own signature
    scratch = Path(given) if (given := os.environ.get(SCRATCH_ENV)) else None
    if scratch is not None:  # the launcher may end while we do, at a second signal
        atexit.register(_remove, scratch, os.getpid())
    threading.Thread(target=_end_group_at_eof, args=(fd, scratch, at_end), name="lifeline", daemon=True).start()


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # forked children inherit this
        remove_leftovers((), scratch)


def _end_group_at_eof(fd: int, scratch: Path | None, at_end: Callable[[], object]) -> None:
    while os.read(fd, 1):
        pass
    at_end()
    group = os.getpgrp()
    shared = shared_memory_of(group_members(group))
    remove_leftovers((), scratch)  # also now, since Ray ends its driver as soon as the others are gone
    _kill_others(group)
    remove_leftovers(shared, scratch)  # the launcher, which usually does it, is gone
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(group: int) -> None:
    """Send SIGKILL to a group except Python's resource trackers, to ourselves last.

    It does not wait for their end, since closing devices takes seconds. A resource tracker unlinks the semaphores and
    shared memory that dead processes left, and ends after the last of them. So it must not be killed with them. A
    tracker that was stopped with its group is continued, or it would stay for ever.
    """
    _kill_others(group)
    if os.getpgrp() == group:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_others(group: int) -> None:
    sent = {os.getpid()}
    while others := set(group_members(group)) - sent:  # repeat, since a process may have forked in between
        for pid in others:
            with suppress(ProcessLookupError):  # ended in between
                os.kill(pid, signal.SIGKILL)
        sent |= others
    for pid in (pid for pid, tracker in _processes_of(group).items() if tracker):
        with suppress(ProcessLookupError):  # it ended after the others
            os.kill(pid, signal.SIGCONT)


def group_members(group: int, field: int = GROUP) -> list[int]:
    """Return the living processes of a group or `PARENT`, without resource trackers."""
    return [pid for pid, tracker in _processes_of(group, field).items() if not tracker]


def _processes_of(group: int, field: int = GROUP) -> dict[int, bool]:
    """Return the living processes of a group, and whether each is a resource tracker."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold any character, so fields are counted from its closing parenthesis.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(fields[field]) == group and fields[0] not in "ZX":
                found[int(entry.name)] = TRACKER in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # ended in between
            continue
    return found
