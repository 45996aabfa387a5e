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
from typing import Literal, Self

from penstock.aio import settled
from penstock.errors import EngineStartError, PenstockError
from penstock.http import HttpTransport
from penstock.process import ChildProcess, remove_leftovers
from penstock.rooms import plugged_in
from penstock.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command to execute: `argv` before the port, and variables to add to our environment, including the key."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    port_option: str = "--port {}"

    def on(self, port: int, gpus: Sequence[str] = ()) -> ServerCommand:
        """Return the command of a server that listens on `port` and sees `gpus` (none: all); on a CPU it sees none."""
        env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **self.env} if gpus else self.env
        return replace(self, argv=(*self.argv, *self.port_option.format(port).split()), env=env)


def resolve_profile(config: EngineConfig) -> Literal["cpu", "gpu", "sim"]:
    """Return the profile. `auto` is `gpu` if there is an NVIDIA device, else `cpu`."""
    if config.profile != "auto":
        return config.profile
    return "gpu" if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() else "cpu"


PROBE_S = 0.2
"""Seconds between two readiness probes. vLLM's port is its only sign of readiness, so there is no event."""


class EngineProcess(ChildProcess):
    """A launched engine server."""

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        name: str,
        log_dir: Path,
        api_key: str | None = None,
        gpus: Sequence[str] = (),
        host: str = "127.0.0.1",
        native: str | None = None,
        command: ServerCommand | None = None,
    ) -> Self:
        """Start a server that sees `gpus` (none: all) on a free port of `host`, and wait.

        `command`: what `command.server_command` made of the other arguments, for one more start.

        Raises:
            ConfigError: the model path is wrong. No process was started.
            EngineStartError: it ended, or was not ready within `config.start_timeout_s` seconds. It is gone, and the
                message has the relevant lines of its log.
        """
        made: ServerCommand = command or plugged_in("launch.command")(config, api_key=api_key, host=host, native=native)
        with reserved_port(host) as port:  # vLLM listens on the port only seconds later
            here = made.on(port, gpus)
            # For sockets between its processes. Not in TMPDIR, because a socket's name has at most 107 bytes.
            scratch = Path(tempfile.mkdtemp(prefix="penstock-e-", dir="/tmp"))
            env = {**here.env, "VLLM_RPC_BASE_PATH": str(scratch)}
            log = log_dir / f"{name}.log"
            async with AsyncExitStack() as undo:
                undo.callback(remove_leftovers, (), scratch)
                engine = await cls.start(here.argv, name=name, log=log, env=env, scratch=scratch)
                undo.pop_all()  # the child itself removes its folder
                undo.push_async_callback(engine.wait)
                undo.callback(engine.kill)
                engine.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                await engine.ready(config, api_key)
                undo.pop_all()
            engine.remember()
            return engine

    async def ready(self, config: EngineConfig, api_key: str | None) -> None:
        """Return once it answers. EngineStartError: it ended or is too slow."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                probe = await settled(self._probe(api_key), self.wait())
                if not probe.cancelled():
                    return probe.result()
                what = f"ended with status {await self.wait()} after {time.monotonic() - begin:.0f} s"
        except TimeoutError:
            what = f"was not ready within {config.start_timeout_s:.0f} s (engine.start_timeout_s)"
        said = plugged_in("launch.says")(self)
        raise EngineStartError(
            f"the {resolve_profile(config)} server for model {config.model} {what}; {said}", engine=self.name
        )

    async def _probe(self, api_key: str | None) -> None:
        http = HttpTransport(self.url, api_key=api_key, name=self.name)
        try:
            while True:
                with suppress(PenstockError):
                    await http.get_text("/health", timeout_s=5.0)
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
