"""One API process: serve the Tinker SDK until a signal."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.asgi import listening, serving_app
from penstock.errors import ConfigError
from penstock.tinker.api import build_app
from penstock.tinker.service_state import Options, opened

WHAT = "the Tinker service"


def refuse_open_service(host: str, options: Options) -> None:
    """Raise ConfigError if a service that any key opens would listen beyond this machine."""
    if not options.tenants.open or host == "localhost":
        return
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise ConfigError(f"without --keys any key opens the service, so --host {host} is refused; give --keys FILE")


@asynccontextmanager
async def serving(options: Options, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve the API while the block runs, and give its base URL; port 0 is any free one.

    Raises:
        ConfigError: the address or the database cannot be used, or anyone could call.
    """
    refuse_open_service(host, options)
    listener = listening(host, port, WHAT)
    async with opened(options) as state, serving_app(build_app(state), listener, WHAT, state.futures.release):
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
