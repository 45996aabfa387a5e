"""One engine server as a child process: launch, readiness, a readable error when it dies, an end that always comes."""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from penstock.config import EngineConfig
from penstock.engine.command import resolve_profile, server_command
from penstock.engine.transport import HttpTransport
from penstock.errors import EngineStartError, PenstockError
from penstock.process import ChildProcess, full_disk, remove_leftovers

PROBE_S = 0.2
"""Between two readiness probes. vLLM announces readiness only on its port, so this one wait has no event to use."""

TELLING = re.compile(r"(^[\w.]*(Error|Exception)\b: .)|\berror: |^Value error, |out of memory|No space left|Killed")
"""An error's own line, not the traceback above it; of a config that vLLM's pydantic refuses, the line that says why."""

LOG_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) )?(ERROR|WARNING|INFO) \S+ \S+ \[[^]]*\] ")
"""What vLLM puts before each line of a traceback that it logs."""


class EngineProcess:
    """A launched engine server."""

    def __init__(self, name: str, url: str, child: ChildProcess) -> None:
        self.name = name
        self.url = url
        self._child = child

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
    ) -> Self:
        """Start a server on a free port of `host` and return when it is ready; it sees `gpus`, or all if none.

        Raises:
            ConfigError: the model path is wrong; nothing was started.
            EngineStartError: it ended, or was not ready within `config.start_timeout_s` seconds; it is gone, and the
                message holds the telling lines of its log.
        """
        with reserved_port(host) as port:  # vLLM listens on it seconds after it was chosen
            command = server_command(config, port=port, api_key=api_key, host=host, gpus=gpus)
            # For the sockets between its processes. Not in TMPDIR: the name of a socket has at most 107 bytes.
            scratch = Path(tempfile.mkdtemp(prefix="penstock-e-", dir="/tmp"))
            env = {**command.env, "VLLM_RPC_BASE_PATH": str(scratch)}
            log = log_dir / f"{name}.log"
            try:
                child = await ChildProcess.start(command.argv, name=name, log=log, env=env, scratch=scratch)
            except BaseException:
                remove_leftovers((), scratch)
                raise
            engine = cls(name, f"http://{f'[{host}]' if ':' in host else host}:{port}", child)
            try:
                await engine._ready(config, api_key)
            except BaseException:
                child.kill()
                await child.wait()
                raise
            child.remember()
            return engine

    @property
    def pid(self) -> int:
        """Process id of the server, and of its process group."""
        return self._child.pid

    @property
    def log(self) -> Path:
        """Its log file."""
        return self._child.log

    async def wait(self) -> int:
        """Wait until it has ended, for whatever reason; returns its exit status."""
        return await self._child.wait()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End it and its whole process group: SIGTERM, then SIGKILL after `timeout_s` seconds."""
        await self._child.stop(timeout_s)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._child.kill()

    async def _ready(self, config: EngineConfig, api_key: str | None) -> None:
        begin = time.monotonic()
        probe = asyncio.create_task(self._probe(api_key))
        exit_status = asyncio.create_task(self.wait())
        try:
            done, _ = await asyncio.wait(
                (probe, exit_status), timeout=config.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (probe, exit_status):
                task.cancel()
        if probe in done and exit_status not in done:
            probe.result()
            return
        seconds = time.monotonic() - begin
        what = (
            f"ended with status {exit_status.result()} after {seconds:.0f} s"
            if exit_status in done
            else f"was not ready within {seconds:.0f} s (engine.start_timeout_s)"
        )
        profile = resolve_profile(config)
        raise EngineStartError(
            f"the {profile} server for model {config.model} {what}; its log ({self.log}) says:\n"
            + full_disk(self.log)
            + telling_lines(self._child.said()),
            engine=self.name,
        )

    async def _probe(self, api_key: str | None) -> None:
        http = HttpTransport(self.url, api_key=api_key, name=self.name)
        try:
            while True:
                try:
                    await http.get_text("/health", timeout_s=5.0)
                except PenstockError:
                    await asyncio.sleep(PROBE_S)
                else:
                    return
        finally:
            await http.close()


@contextmanager
def reserved_port(host: str = "127.0.0.1", port: int = 0) -> Generator[int]:
    """A free TCP port of `host`, an IP address, that the kernel gives to nobody else meanwhile.

    A server that sets SO_REUSEADDR, as servers do, can listen on it all the same, because here nobody listens.
    OSError where somebody listens at the `port` that was asked for.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        yield int(holder.getsockname()[1])


def telling_lines(log: str, most: int = 6) -> str:
    """The lines of a server's log that say what went wrong: the last ones naming an error, else the last ones."""
    lines = [LOG_PREFIX.sub("", line).strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if TELLING.search(line)]
    return "\n".join(dict.fromkeys((errors or lines)[-most:]))
