"""How a process that reads another's memory learns that it is not lent any more: by an end of file.

The lender holds both ends of a pipe; who borrows opens the pipe through `/proc/PID/fd/N` and reads. Nothing is ever
written: the read ends when the lender closes the pipe, or when its process ends, by any signal.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable

from penstock.errors import WeightsError


class Lease:
    """The lender's side; it lasts until `close`, or until the process ends."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.path = f"/proc/{os.getpid()}/fd/{self._read}"
        """Where a process of the same user borrows."""

    def close(self) -> None:
        """Tell all who borrowed; closing twice is harmless."""
        # The read end first: a pipe that can be found has a writer, so that nobody waits for one.
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1


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
