"""One worker of a router as its hub has it: a child process, and calls to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import orjson

from penstock.process import LIFELINE_ENV
from penstock.router.control_channel import ControlChannel, Handler
from penstock.router.shared_state import Layout


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What a worker inherits: numbers of open files, and who it is. Goes on its command line, so no secrets."""

    process: int
    """Its row in the shared memory."""
    layout: Layout
    memory: int
    bells: tuple[int, ...]
    listening: int
    control: int

    def text(self) -> str:
        """As an argument."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def of(cls, text: str) -> Self:
        """The inverse of `text`."""
        values: dict[str, Any] = orjson.loads(text)
        values["layout"] = Layout(**values["layout"])
        values["bells"] = tuple(values["bells"])
        return cls(**values)

    def files(self) -> tuple[int, ...]:
        """All that it inherits."""
        return (self.memory, *self.bells, self.listening, self.control)


class WorkerProcess:
    """A running worker. It ends with us, however we end."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ControlChannel, alive_fd: int) -> None:
        self._process = process
        self._channel = channel
        self._alive_fd = alive_fd

    @classmethod
    async def start(
        cls,
        process: int,
        layout: Layout,
        *,
        memory: int,
        bells: Sequence[int],
        listening: socket.socket,
        handler: Handler,
    ) -> Self:
        """Start one that waits for its first call. `handler` answers its own calls."""
        ours, theirs = socket.socketpair()
        read_fd, write_fd = os.pipe()
        place = WorkerPlace(process, layout, memory, tuple(bells), listening.fileno(), theirs.fileno())
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.router.worker", place.text(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={**os.environ, LIFELINE_ENV: str(read_fd)},
                pass_fds=(*place.files(), read_fd),
                start_new_session=True,
            )  # fmt: skip
            channel = await ControlChannel.open(f"router worker {process}", ours, handler)
        except BaseException:
            os.close(write_fd)  # ends the child, if there is one
            ours.close()
            raise
        finally:
            os.close(read_fd)
            theirs.close()
        return cls(child, channel, write_fd)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def call(self, message: Mapping[str, Any], *, deadline_s: float) -> dict[str, Any]:
        """See `ControlChannel.call`."""
        return await self._channel.call(message, deadline_s=deadline_s)

    def tell(self, message: Mapping[str, Any]) -> None:
        """See `ControlChannel.tell`."""
        self._channel.tell(message)

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it, without its having a say."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def release(self) -> None:
        """It has ended: give back what belonged to it."""
        await self._channel.close()
        os.close(self._alive_fd)
