"""A child process ends when its launcher ends, however the launcher ends.

The launcher keeps the write end of a pipe open for each child; the child watches the read end. The kernel closes the
write end when the launcher exits, SIGKILL included, and the child then ends its whole process group. This needs no
polling, and unlike PR_SET_PDEATHSIG it does not fire when merely the thread that started the child ends.
"""

from __future__ import annotations

import os
import signal
import threading

ENV = "PENSTOCK_LIFELINE_FD"
"""Environment variable that carries the number of the read end."""


def watch() -> None:
    """Called first thing in a child: end this process group when the launcher is gone.

    Does nothing where the variable is absent (a server that a person started).
    """
    fd_text = os.environ.pop(ENV, None)
    if fd_text is None:
        return
    fd = int(fd_text)
    os.set_inheritable(fd, False)  # noqa: FBT003 - the os module's own signature
    threading.Thread(target=_end_group_at_eof, args=(fd,), name="penstock-lifeline", daemon=True).start()


def _end_group_at_eof(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
