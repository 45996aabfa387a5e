"""The API process: `python -m penstock.tinker.api_process FD OPTIONS` serves the Tinker SDK until a signal."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from penstock.tinker.children import run_child
from penstock.tinker.server import serving
from penstock.tinker.service_state import About, Options
from penstock.tinker.tenants import read_keys


def options_of(values: Mapping[str, Any]) -> Options:
    """Return the options of the owner's JSON. ConfigError: the keys cannot be read."""
    return Options(
        data=Path(values["data"]),
        database=str(values["database"]),
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
