"""`python -m penstock.sim --port 8000`: one simulated engine until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import ConfigError, PenstockError, UserError
from penstock.process import raise_file_limit, watch_lifeline
from penstock.sim.config import Fault, SimConfig
from penstock.sim.server import SimServer
from penstock.types import TensorSpec

API_KEY_ENV = "PENSTOCK_API_KEY"
READY = "penstock-sim ready"
"""The line printed once it serves: `penstock-sim ready NAME http://127.0.0.1:PORT`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, serve, and return the exit status: 2 for bad options, 1 where it cannot start."""
    watch_lifeline()
    try:
        config = _config(argv)
        asyncio.run(serve(config, lambda url: _say(f"{READY} {config.name} {url}")))
    except PenstockError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


async def serve(config: SimConfig, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called with the address once it listens.

    Raises:
        EngineStartError: the port is taken.
    """
    raise_file_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with SimServer(config, own_process=True) as server:
        ready(server.url)
        await stop.wait()


def _config(argv: Sequence[str] | None) -> SimConfig:
    parser = argparse.ArgumentParser(prog="python -m penstock.sim", description="A simulated vLLM engine.")
    for field in dataclasses.fields(SimConfig):
        flag = "--" + field.name.replace("_", "-")
        default: object = field.default
        if field.name in ("faults", "tensor_specs"):
            continue
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=type(default) if isinstance(default, (int, float)) else str, default=default)
    parser.add_argument("--fault", action="append", default=[], help="such as hang:phase=pause or exit:phase=load")
    parser.add_argument("--tensor-specs", type=Path, help='JSON file: [["name", "dtype", [shape]], ...]')
    options = vars(parser.parse_args(argv))
    faults = tuple(Fault.parse(text) for text in options.pop("fault"))
    file: Path | None = options.pop("tensor_specs")
    # A launcher passes the key in the environment, where other users of the machine do not see it.
    options["api_key"] = options["api_key"] or os.environ.get(API_KEY_ENV) or None
    return SimConfig(**options, faults=faults, tensor_specs=None if file is None else _specs(file))


def _specs(file: Path) -> tuple[TensorSpec, ...]:
    try:
        rows = json.loads(file.read_text())
        return tuple(TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in rows)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read tensor specs from {file}: {error}") from error


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
