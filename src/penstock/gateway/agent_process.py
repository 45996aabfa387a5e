"""Runs an agent's command so that nothing of it outlives the episode: `python -m penstock.gateway.agent_process WORDS`.

We adopt what its processes leave behind, also in sessions of their own, and end all of it: when the command has ended,
`GRACE_S` after a SIGTERM, or at once when our launcher is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from penstock.process_group import PARENT, group_members, watch_lifeline

GRACE_S = 5
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux: orphans among our descendants become our children."""


def main() -> int:
    """Run the command in our arguments, and return its exit status when none of its processes is left."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    watch_lifeline(_end_children)
    stopping: list[int] = []

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        signal.alarm(GRACE_S)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, _end_children)
    command = subprocess.Popen(sys.argv[1:])
    status = 0
    while True:
        try:
            pid, code = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == command.pid:
            command.returncode = code = os.waitstatus_to_exitcode(code)
            status = code if code >= 0 else 128 - code  # as shells say it
            if not stopping:  # else its helpers have the rest of the time to end
                _end_children()


def _end_children(*_: object) -> None:
    """Kill all that descends from us. The children of what is killed become ours, and are next."""
    while pids := group_members(os.getpid(), PARENT):
        for pid in pids:
            with suppress(ProcessLookupError):  # ended in between
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # each wait for a child would take its status from `main`


if __name__ == "__main__":
    sys.exit(main())
