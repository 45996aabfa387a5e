"""Which router a fleet runs behind: ours, started here or found running, or a vllm-router that runs."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import RouterConfig, refuse_open_host
from penstock.errors import ConfigError, EngineStartError, PenstockError
from penstock.fleet.roster import Admin
from penstock.fleet.router_guard import RouterGuard
from penstock.fleet.router_process import RouterProcess
from penstock.fleet.vllm_router import VllmRouterAdmin
from penstock.router.admin_client import RouterAdmin

logger = logging.getLogger(__name__)


_ADDRESS = {"kind", "url", "host", "port"}


def check_router(config: RouterConfig, api_key: str | None) -> None:
    """Refuse what can be known to be wrong before anything starts.

    Raises:
        ConfigError: the router would be open to other machines without a key, vllm-router has no URL, or an option
            would have no effect.
    """
    if config.url is None:
        if config.kind == "vllm-router":
            raise ConfigError(
                "router.kind=vllm-router needs router.url: a fleet starts no vllm-router of its own; start one "
                "(`vllm-router --host 127.0.0.1 --port 30000 --policy consistent_hash`) and give its URL"
            )
        refuse_open_host(config.host, api_key)
        return
    for name, default in RouterConfig().model_dump(exclude=_ADDRESS).items():
        value = getattr(config, name)
        if value != default:
            raise ConfigError(
                f"router.{name}={value} would have no effect: the router at {config.url} runs already, with options "
                "of its own; leave it out"
            )


@dataclass(frozen=True, slots=True)
class OpenRouter:
    """A router that a fleet runs behind.

    Attributes:
        url: where it listens.
        admin: its control side.
        guard: keeps its process up; None where someone else started it.
        key: what its admin calls need; None: nothing.
    """

    url: str
    admin: Admin
    guard: RouterGuard | None = None
    key: str | None = field(default=None, repr=False)


async def open_router(
    config: RouterConfig,
    *,
    log_dir: Path,
    api_key: str | None,
    owned: AsyncExitStack,
    admin_key: str | None = None,
) -> OpenRouter:
    """A router that ends with `owned`, or the one that runs at `config.url`.

    A router that is started here takes `api_key` from clients and `admin_key` from its fleet. One that runs on loses
    its engines at the end, since they are gone by then or not ours to route to.

    Raises:
        EngineStartError: it did not start.
        EngineDeadError: nobody answers at `config.url`; `UserError` or `EngineHTTPError`: it is another program.
    """
    url, guard, key = config.url, None, api_key
    if url is None:
        key = admin_key or api_key
        router = await _launch(config, log_dir, api_key, key)
        url = router.url
        again = config.model_copy(update={"port": urlsplit(url).port})
        guard = RouterGuard(router, lambda policy: _launch(again.model_copy(update=policy), log_dir, api_key, key))
    admin = VllmRouterAdmin(url) if config.kind == "vllm-router" else RouterAdmin(url, key)
    owned.push_async_callback(admin.close)
    if guard is not None:
        owned.push_async_callback(guard.stop)  # before: it asks the router until it ends, and would open it again
    else:
        await admin.engines()
        owned.push_async_callback(_withdraw, admin)
    return OpenRouter(url, admin, guard, key)


async def _launch(config: RouterConfig, log_dir: Path, api_key: str | None, admin_key: str | None) -> RouterProcess:
    try:
        return await RouterProcess.launch(config, log_dir=log_dir, api_key=api_key, admin_key=admin_key)
    except OSError as error:  # no memory, descriptor or room on a disk is left, or its log's folder is gone
        what = f"open the router's log {error.filename}" if error.filename else "start a process for the router"
        raise EngineStartError(f"this system cannot {what}: {error.strerror or error}") from error


async def _withdraw(admin: Admin) -> None:
    try:
        await admin.set_engines((await admin.engines()).epoch + 1, ())
    except PenstockError as error:
        # The fleet ends all the same; whoever owns the router sees from this what it was not told.
        logger.warning("the router was not told that this fleet's engines are gone: %s", error)
