"""The child's end of a lifeline: a process group ends when its launcher is gone (`process.py`)."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.process import LIFELINE_ENV, SCRATCH_ENV, group_members, kill_group, remove_leftovers, shared_memory_of


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
    group = os.getpgrp()
    try:
        at_end()
        shared = shared_memory_of(group_members(group))
        remove_leftovers((), scratch)  # also now, since Ray ends its driver as soon as the others are gone
        kill_group(group)
        remove_leftovers(shared, scratch)  # the launcher, which usually does it, is gone
    finally:  # also without a free file descriptor, which a list of the group needs
        os.killpg(group, signal.SIGKILL)
