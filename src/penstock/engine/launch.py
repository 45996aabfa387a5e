"""Launches an engine server as a process, and says why if it does not start."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from penstock.aio import settled
from penstock.errors import EngineStartError, PenstockError
from penstock.http import HttpTransport
from penstock.process import ChildProcess, remove_leftovers
from penstock.rooms import plugged_in


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The start of a server, on any port and GPUs (`command.server_command`)."""

    argv: tuple[str, ...]
    """The command before the port."""
    env: dict[str, str] = field(repr=False)
    """Variables to add to our environment, including the key."""
    what: str
    """The server, in errors."""
    start_timeout_s: float
    api_key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port_option: str = "--port {}"

    def on(self, port: int, gpus: Sequence[str] = ()) -> ServerCommand:
        """Return the command of a server that listens on `port` and sees `gpus` (none: all); on a CPU it sees none."""
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **self.env} if gpus else self.env
        return replace(self, argv=(*self.argv, *self.port_option.format(port).split()), env=env)


PROBE_S = 0.2
"""Seconds between two readiness probes. vLLM's port is its only sign of readiness, so there is no event."""


class EngineProcess(ChildProcess):
    """A launched engine server."""

    @classmethod
    async def launch(cls, command: ServerCommand, *, name: str, log_dir: Path, gpus: Sequence[str] = ()) -> Self:
        """Start a server that sees `gpus` (none: all) on a free port of its host, and wait.

        Raises:
            EngineStartError: it ended, or was not ready within `start_timeout_s` seconds. It was killed, and the
                message has the relevant lines of its log.
        """
        host = command.host
        with reserved_port(host) as port:  # vLLM listens on the port only seconds later
            here = command.on(port, gpus)
            # For sockets between its processes. Not in TMPDIR, because a socket's name has at most 107 bytes.
            scratch = Path(tempfile.mkdtemp(prefix="penstock-e-", dir="/tmp"))
            env = {**here.env, "VLLM_RPC_BASE_PATH": str(scratch)}
            log = log_dir / f"{name}.log"
            async with AsyncExitStack() as undo:
                undo.callback(remove_leftovers, (), scratch)
                engine = await cls.start(here.argv, name=name, log=log, env=env, scratch=scratch)
                undo.pop_all()  # the child itself removes its folder
                undo.push_async_callback(engine.stop, 0.0)
                engine.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                await engine.ready(command)
                undo.pop_all()
            engine.remember()
            return engine

    async def ready(self, command: ServerCommand) -> None:
        """Return once it answers. EngineStartError: it ended or is too slow."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(command.start_timeout_s):
                probe = await settled(self._probe(command.api_key), self.wait())
                if not probe.cancelled():
                    return probe.result()
                what = f"ended with status {await self.wait()} after {time.monotonic() - begin:.0f} s"
        except TimeoutError:
            what = f"was not ready within {command.start_timeout_s:.0f} s (engine.start_timeout_s)"
        said = plugged_in("launch.says")(self)
        raise EngineStartError(f"{command.what} {what}; {said}", engine=self.name)

    async def _probe(self, api_key: str | None) -> None:
        http = HttpTransport(self.url, api_key=api_key, name=self.name)
        try:
            while True:
                with suppress(PenstockError):
                    await http.call("GET", "/health", None, timeout_s=5.0)
                    return
                await asyncio.sleep(PROBE_S)
        finally:
            await http.close()


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """Reserve a free TCP port of the IP address `host` during the block.

    A server that sets SO_REUSEADDR, as servers do, can still listen on it, because no socket listens here.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
