"""How a process that reads another's memory learns that it is not lent any more: by an end of file.

The lender holds both ends of a pipe; who borrows opens the pipe through `/proc/PID/fd/N` and reads. Nothing is ever
written: the read ends when the lender closes the pipe, or when its process ends, by any signal. What the lender forks,
such as the workers of a data loader, would hold the pipe open after it: a forked child closes its copies at once.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable

from penstock.errors import WeightsError

_no_fork = threading.RLock()
"""Held through every fork, so that no other thread is opening or closing a pipe meanwhile."""


class Lease:
    """The lender's side; it lasts until `close`, or until the process ends. In a forked child it is closed."""

    def __init__(self) -> None:
        with _no_fork:
            self._ends = os.pipe()
            _open.add(self)
        self.path = f"/proc/{os.getpid()}/fd/{self._ends[0]}"
        """Where a process of the same user borrows."""

    def close(self) -> None:
        """Tell all who borrowed; closing twice is harmless."""
        with _no_fork:
            if self in _open:
                _open.remove(self)
                # The read end first: a pipe that can be found has a writer, so that nobody waits for one.
                for fd in self._ends:
                    os.close(fd)


_open: set[Lease] = set()
"""All that are not closed, also those that nobody refers to any more: their pipes are open."""


def _forked() -> None:
    for lease in tuple(_open):
        lease.close()
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_forked)


def borrow(path: str, ended: Callable[[], None]) -> None:
    """Have `ended` called, in a thread of its own, when the lease is over.

    Raises:
        WeightsError: it is over already, or this is no lease.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(
            f"cannot reach the process that lends its weights at {path}: {error.strerror}; it must be alive, on this "
            "host, and of the same user"
        ) from error
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise WeightsError(f"{path} is not the lease of a store of weights")
    os.set_blocking(fd, True)

    def wait() -> None:
        while os.read(fd, 1):
            pass
        os.close(fd)
        ended()

    threading.Thread(target=wait, name="penstock-lease", daemon=True).start()
