"""Runs an agent's command: `python -m penstock.gateway.agent_process WORDS`. No process outlives the episode.

This process adopts everything that the command leaves behind, including processes in other sessions. It ends all of
them when the command has ended, `GRACE_S` after a SIGTERM, or at once when its launcher is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from penstock.lifeline import watch_lifeline
from penstock.process import PARENT, group_members

GRACE_S = 5
_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: orphaned descendants become children of this process."""


def main() -> int:
    """Run the command from the arguments. Return its exit status once all its processes have ended."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    watch_lifeline(_end_children)
    stopping: list[int] = []

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        signal.alarm(GRACE_S)

    # A signal just before a wait for children would not end it; its byte in this pipe ends a read at any time.
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, _end_children)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # a handler, so that it writes its byte
    command = subprocess.Popen(sys.argv[1:])
    status = 0
    while True:
        os.read(read_fd, 1)
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == command.pid:
                    command.returncode = code = os.waitstatus_to_exitcode(ended[1])
                    status = code if code >= 0 else 128 - code  # the shell's status for a signal
                    if not stopping:  # else its helpers may use the rest of the grace time
                        _end_children()
        except ChildProcessError:
            return status


def _end_children(*_: object) -> None:
    """Kill all descendants. The children of a killed process become ours and are killed next."""
    while pids := group_members(os.getpid(), PARENT):
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended in between
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # a wait for children here would take the command's status away from `main`


if __name__ == "__main__":
    sys.exit(main())
