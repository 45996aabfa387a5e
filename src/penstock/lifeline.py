"""A child process ends when its launcher ends, however the launcher ends.

The launcher keeps the write end of a pipe open for each child; the child watches the read end. The kernel closes the
write end when the launcher exits, SIGKILL included, and the child then ends its whole process group. This needs no
polling, and unlike PR_SET_PDEATHSIG it does not fire when merely the thread that started the child ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from penstock import leftovers

ENV = "PENSTOCK_LIFELINE_FD"
"""Environment variable that carries the number of the read end."""


TRACKER = b"multiprocessing.resource_tracker"


def watch() -> None:
    """Called first thing in a child: end this process group when the launcher is gone.

    Does nothing where the variable is absent (a server that a person started).
    """
    fd_text = os.environ.pop(ENV, None)
    if fd_text is None:
        return
    fd = int(fd_text)
    os.set_inheritable(fd, False)  # noqa: FBT003 - the os module's own signature
    scratch = Path(given) if (given := os.environ.get(leftovers.SCRATCH_ENV)) else None
    if scratch is not None:  # who started us may end while we do, by the second of two signals
        atexit.register(_remove, scratch, os.getpid())
    threading.Thread(target=_end_group_at_eof, args=(fd, scratch), name="penstock-lifeline", daemon=True).start()


def _remove(scratch: Path, owner: int) -> None:
    if os.getpid() == owner:  # what we fork inherits this
        leftovers.remove((), scratch)


def _end_group_at_eof(fd: int, scratch: Path | None) -> None:
    while os.read(fd, 1):
        pass
    group = os.getpgrp()
    shared = leftovers.shared_memory_of(members(group))
    leftovers.remove((), scratch)  # now too: Ray ends its driver as soon as the others are gone
    _kill_others(group)
    leftovers.remove(shared, scratch)  # nobody else would: who started us is gone
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(group: int) -> None:
    """SIGKILL to every process of a group but Python's resource trackers; to ourselves last, if we are of it.

    Returns when all have been sent it, not when they are gone: one whose devices have to be closed takes seconds.
    A resource tracker unlinks the named semaphores and shared memory of processes that died without doing so, and ends
    when the last of them has; killed together with them it would leave those names behind. One that was stopped along
    with its group goes on, or it would stay for ever.
    """
    _kill_others(group)
    if os.getpgrp() == group:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_others(group: int) -> None:
    sent = {os.getpid()}
    while others := set(members(group)) - sent:  # again, since one may have forked in between
        for pid in others:
            with suppress(ProcessLookupError):  # ended in between
                os.kill(pid, signal.SIGKILL)
        sent |= others
    for pid in (pid for pid, tracker in _of(group).items() if tracker):
        with suppress(ProcessLookupError):  # it has seen the others end
            os.kill(pid, signal.SIGCONT)


def members(group: int) -> list[int]:
    """Living processes of a group without resource trackers."""
    return [pid for pid, tracker in _of(group).items() if not tracker]


def _of(group: int) -> dict[int, bool]:
    """Living processes of a group, and whether each is a resource tracker."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold anything, so fields are counted from its closing parenthesis.
            state, _parent, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found[int(entry.name)] = TRACKER in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # ended in between
            continue
    return found
