"""vllm-router in the place of ours: its process, and its worker calls behind the control interface of a router.

What it lacks of ours: it has no gate, so that new requests wait inside paused engines; no epoch, no weight versions and
no draining; it holds no request, and answers 503 where no engine is up; it drops the caller's key on every path but
those that generate, so that engines with a key refuse `/tokenize`; its worker calls ask nobody for one, so that it
listens on this machine only.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from penstock.config import RouterConfig, refuse_open_host
from penstock.engine.concurrent import all_or_first_error
from penstock.engine.process import reserved_port, telling_lines
from penstock.engine.transport import HttpTransport
from penstock.errors import ConfigError, EngineStartError, UserError
from penstock.process import ChildProcess
from penstock.router.admin_client import EngineLoad, RouterState
from penstock.router.membership import EngineEntry, Membership

logger = logging.getLogger(__name__)

START_S = 60.0
"""Deadline of its start, which takes half a second on an idle machine."""
LOOK_S = 0.05
"""Between two looks whether it listens, which it announces nowhere else."""
STOP_S = 5.0
"""Between SIGTERM and SIGKILL."""
WORKER_S = 10
"""How long it waits for a new worker's health, in whole seconds."""
CALL_S = WORKER_S + 5.0
"""Deadline of one of its worker calls."""
ENDLESS_S = 7 * 24 * 3600
"""Its deadline of a request. The client has its own; vllm-router's default ends a generation after half an hour."""

POLICIES = {
    "bounded-sticky": "sticky_least_loaded",  # the nearest that it has
    "sticky-least-loaded": "sticky_least_loaded",
    "consistent-hash": "consistent_hash",
    "prefix-aware": "cache_aware",
    "power-of-two": "power_of_two",
    "round-robin": "round_robin",
    "random": "random",
}
"""Our policies to those of vllm-router."""


def policy_of(config: RouterConfig) -> str:
    """Name of vllm-router's policy for `config.policy`. Raises ConfigError where it has none like it."""
    if config.policy not in POLICIES:
        raise ConfigError(
            f"router.policy {config.policy!r}: with router.kind vllm-router it must be one of {', '.join(POLICIES)}"
        )
    return POLICIES[config.policy]


def check_vllm_router(config: RouterConfig) -> None:
    """Raise ConfigError for what vllm-router cannot do, UserError where it is not installed."""
    policy_of(config)
    # Whoever reaches it can add and remove workers, whatever key the engines ask for.
    refuse_open_host(config.host, None)
    if find_spec("vllm_router") is None:
        raise UserError(
            "router.kind is vllm-router, which is not installed; pip install 'penstock[bench]' or vllm-router, or "
            "keep router.kind=penstock"
        )


class VllmRouterProcess:
    """A running vllm-router without workers."""

    def __init__(self, url: str, child: ChildProcess) -> None:
        self.url = url
        self._child = child

    @classmethod
    async def launch(cls, config: RouterConfig, *, log_dir: Path) -> Self:
        """Start it and return when it listens.

        Raises:
            UserError: it is not installed.
            ConfigError: it cannot do what `config` asks for.
            EngineStartError: it ended, or did not listen within `START_S` seconds; it is gone, and the message holds
                the telling lines of its log.
        """
        check_vllm_router(config)
        with _reserved(config) as port, reserved_port() as metrics:
            host = f"[{config.host}]" if ":" in config.host else config.host
            argv = [sys.executable, "-m", "penstock.fleet.under_lifeline", *command(config, port, metrics)]
            child = await ChildProcess.start(argv, name="vllm-router", log=log_dir / "router.log")
            router = cls(f"http://{host}:{port}", child)
            try:
                await router._ready()
            except BaseException:
                child.kill()
                await child.wait()
                raise
            return router

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit status."""
        return await self._child.wait()

    async def stop(self) -> None:
        """End it."""
        await self._child.stop(STOP_S)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        self._child.kill()

    async def _ready(self) -> None:
        parts = urlsplit(self.url)
        try:
            async with asyncio.timeout(START_S):
                while self._child.returncode is None:
                    try:
                        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                    except OSError:
                        await asyncio.sleep(LOOK_S)
                    else:
                        writer.close()
                        return
            what = f"ended with status {self._child.returncode}"
        except TimeoutError:
            what = f"did not listen within {START_S:g} s"
        lines = telling_lines(self._child.said())
        raise EngineStartError(f"vllm-router {what}; its log ({self._child.log}) says:\n{lines}")


@contextmanager
def _reserved(config: RouterConfig) -> Generator[int]:
    """Its port. Whoever listens there already would be taken for it, and get this fleet's engines."""
    with ExitStack() as held:
        try:
            port = held.enter_context(reserved_port(config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"vllm-router cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose "
                "another router.port, or 0 for any"
            ) from error
        yield port


def command(config: RouterConfig, port: int, metrics_port: int) -> list[str]:
    """Its command line. It gets no API key: the callers' goes on to the engines, which ask for it.

    Its own `--api-key` would be put on every request that it sends on, whoever sent it, control calls included.
    """
    options = {
        "host": config.host,
        "port": port,
        "policy": policy_of(config),
        "prometheus-port": metrics_port,  # else a fixed one, which a second router could not have
        "log-level": "warning",  # at `info`, several lines a request
        "max-payload-size": config.max_body_bytes,
        "max-concurrent-requests": config.max_held,  # above it, 429
        "request-timeout-secs": ENDLESS_S,
        "worker-startup-timeout-secs": WORKER_S,
        "worker-startup-check-interval": 1,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm_router.launch_router", *arguments]


class VllmRouterAdmin:
    """A vllm-router's workers as the full sets that a roster announces; see `router.admin_client.RouterAdmin`.

    Every method raises `EngineDeadError` where the router is gone, `DeadlineError` after `CALL_S` seconds, `UserError`
    where something else answers, and `EngineHTTPError` for a worker that it does not take.
    """

    def __init__(self, url: str) -> None:
        self._http = HttpTransport(url, name=f"vllm-router at {url}")
        self._membership = Membership()
        self._said = False

    async def set_engines(self, epoch: int, engines: Sequence[EngineEntry], cut: Sequence[str] = ()) -> None:  # noqa: ARG002 - as RouterAdmin has it
        """Make its workers those of `engines` that are eligible; others are removed, whoever added them.

        One that drains is removed too: vllm-router would send it new sessions as well. Its requests in flight go on.
        It knows no epochs, so an older one is refused here (`StateError`): of this fleet's own messages the newest is
        in force. Those that may not serve leave before others come. It breaks off nothing, so `cut` has no effect.
        """
        announced = self._membership.replaced_by(epoch, engines)
        wanted = {entry.url for entry in announced.engines if entry.eligible and not entry.draining}
        present = set((await self._workers()).keys())
        for url in sorted(present - wanted):
            await self._change("remove", url)
        await all_or_first_error(self._change("add", url) for url in sorted(wanted - present))
        self._membership = announced

    async def gate(self, closed: bool) -> None:  # noqa: FBT001 - the router's own signature
        """Nothing: it has no gate. Engines that are paused queue what arrives meanwhile, so nothing is lost."""
        if closed and not self._said:
            self._said = True
            logger.info("vllm-router has no gate; while engines are paused, new requests wait inside them")

    async def engines(self) -> RouterState:
        """The set in force. Of its figures it tells each worker's health and requests in flight; the others are 0."""
        workers = await self._workers()
        loads: list[EngineLoad] = []
        for entry in self._membership.engines:
            worker = workers.get(entry.url, {})
            loads.append(
                EngineLoad(
                    name=entry.name,
                    url=entry.url,
                    weight_version=entry.weight_version,
                    eligible=entry.url in workers,
                    down=not worker.get("is_healthy", False),
                    outstanding=worker.get("load", 0),
                    requests=0,
                )
            )
        epoch = self._membership.epoch
        return RouterState(epoch=epoch, gate_closed=False, held=0, sessions=0, requests=0, engines=tuple(loads))

    async def close(self) -> None:
        """Close connections."""
        await self._http.close()

    async def _workers(self) -> dict[str, dict[str, Any]]:
        """Its workers by URL."""
        try:
            answer = await self._http.get("/workers", timeout_s=CALL_S)
            return {worker["url"]: worker for worker in answer["workers"]}
        except (KeyError, TypeError) as error:
            raise UserError(f"{self._http.url} answers, but is no vllm-router ({error!r} in GET /workers)") from error

    async def _change(self, what: Literal["add", "remove"], url: str) -> None:
        await self._http.call("POST", f"/{what}_worker", b"", timeout_s=CALL_S, params={"url": url})
