"""Serve a gateway over HTTP, within a running event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.asgi import listening, serving_app
from penstock.gateway.app import build_app
from penstock.gateway.service import Gateway


@asynccontextmanager
async def serving(
    gateway: Gateway, *, host: str = "127.0.0.1", port: int = 0, max_connections: int | None = None
) -> AsyncGenerator[str]:
    """Serve a gateway while the block runs, and give its base URL; port 0 is any free one.

    Args:
        gateway: to serve; it is closed at the end.
        host: address to listen on.
        port: to listen on.
        max_connections: see `penstock.asgi.serving_app`.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = listening(host, port, "the gateway")
    app = build_app(gateway)
    async with serving_app(app, listener, "the gateway", gateway.close, max_connections=max_connections):
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
