"""`python under_lifeline.py PROGRAM ARGUMENTS...`: a program that knows no lifeline ends with us too.

The thread that watches a lifeline needs an interpreter that runs. vllm-router is a Python program, but its server holds
the interpreter's lock for as long as it serves, so the watching is done here, in the process that started it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from penstock.lifeline import watch_lifeline


def main(argv: Sequence[str]) -> int:
    """Run `argv` in our process group until it ends; returns its exit status, 128 + N for signal N."""
    watch_lifeline()
    # The whole group is told to end; the program does so in its own time, and then we do.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_it_to_the_program)
    status = subprocess.call(argv)
    return status if status >= 0 else 128 - status


def _leave_it_to_the_program(_number: int, _frame: object) -> None:
    """A handler, and not SIG_IGN, which the program would inherit."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
