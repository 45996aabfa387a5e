"""The API process: `python -m penstock.tinker.api_process FD OPTIONS`."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from penstock.asgi import listening, serving_app
from penstock.tinker.api import build_app
from penstock.tinker.children import run_child
from penstock.tinker.database import DATABASE
from penstock.tinker.service_state import About, Options, opened
from penstock.tinker.tenants import read_keys, refuse_open_service

WHAT = "the Tinker service"


@asynccontextmanager
async def serving(options: Options, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve the API while the block runs, and yield its base URL. Port 0 picks a free port.

    Raises:
        ConfigError: the address or the database cannot be used, or the service would be open to anyone.
    """
    refuse_open_service(host, options.tenants)
    listener = listening(host, port, WHAT)
    async with opened(options) as state, serving_app(build_app(state), listener, WHAT, state.futures.release):
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"


def options_of(values: Mapping[str, Any]) -> Options:
    """Return the options from the owner's JSON. ConfigError: the keys cannot be read."""
    return Options(
        data=Path(values["data"]),
        database=os.environ[DATABASE],
        tenants=read_keys(None if values["keys"] is None else Path(values["keys"])),
        learner=Path(values["learner"]),
        fleet=str(values["fleet"]),
        about=About(**values["about"]),
    )


@asynccontextmanager
async def _serve(options: str) -> AsyncGenerator[str]:
    values: dict[str, Any] = orjson.loads(options)
    async with serving(options_of(values), host=values["host"], port=values["port"]) as url:
        yield url


if __name__ == "__main__":
    sys.exit(run_child(_serve))
