"""A child process that one speaks to in lines."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

END_S = 30


class LineProcess:
    """Its stdin and stdout."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process started with pipes has them")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def tell(self, line: str) -> None:
        """Write a line."""
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def ask(self, line: str) -> str:
        """Write a line and read one; empty if the process has ended."""
        self.tell(line)
        return self._stdout.readline()

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Close its stdin, at which it ends, and wait for it."""
        self._stdin.close()
        self._process.wait(END_S)
        self._stdout.close()
