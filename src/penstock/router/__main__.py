"""`python -m penstock.router`: the router as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Protocol

import orjson
import uvloop

from penstock.errors import PenstockError, UserError
from penstock.process import raise_file_limit, watch_lifeline
from penstock.rooms import plugged_in
from penstock.router.server import Router
from penstock.settings import RouterConfig, validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM. Exit status 2: it could not be started as asked; 1: its workers do not start."""
    watch_lifeline()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = vars(_parser().parse_args(arguments))
    popped = ("api_key_env", "admin_key_env", "ready_fd", "worker")
    key_env, admin_env, ready_fd, place = (options.pop(name) for name in popped)
    pipe = None if ready_fd is None else os.fdopen(ready_fd, "wb")
    try:
        config = validate(RouterConfig, {name: value for name, value in options.items() if value is not None})
        keys = _key("--api-key-env", key_env), _key("--admin-key-env", admin_env)
        if config.access_log:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        raise_file_limit()
        _keep_freed_memory()
        if config.workers > 1:
            served: _Served = plugged_in("router.workers")(config, keys, arguments, place)
        else:
            served = Router(config, api_key=keys[0], admin_key=keys[1])
        uvloop.run(_serve(served, pipe))
    except PenstockError as error:
        _report(pipe, {"error": str(error), "usage": isinstance(error, UserError)})
        _print(2, f"penstock router: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


def _print(fd: int, line: str) -> str | None:
    """Write a line for people; returns why that failed. A log on a full disk must not end the router."""
    try:
        os.write(fd, line.encode())
    except OSError as error:
        return error.strerror
    return None


def _report(pipe: BinaryIO | None, message: Mapping[str, Any]) -> None:
    """Report once to the process that started this one whether it serves; a pipe, since no full disk stops it."""
    if pipe is not None and not pipe.closed:
        with suppress(BrokenPipeError), pipe:
            pipe.write(orjson.dumps(message) + b"\n")


class _Served(Protocol):
    """A `Router`, or the router of several processes."""

    @property
    def url(self) -> str: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...


async def _serve(served: _Served, pipe: BinaryIO | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await served.start()
        log_error = _print(1, f"penstock router ready on {served.url}\n")
        _report(pipe, {"url": served.url, "log_error": log_error})
        await stop.wait()
    finally:
        await served.close()


def _key(option: str, env: str | None) -> str | None:
    if env is None:
        return None
    key = os.environ.get(env)
    if not key:
        raise UserError(f"{option} {env}: that environment variable is not set")
    return key


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt(3)."""


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB that bodies have left, instead of giving pages back and faulting them in again.

    Halves the cost of a 200 KB prompt. Other C libraries have no `mallopt`, and need none of it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 64 << 20), (_M_TOP_PAD, 16 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)


_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "policy": "or several, with commas between them",
    "prefix_length": "tokens of a shared prefix for which an engine is preferred",
    "overload_threshold": "times the mean of requests at which prefix-aware passes over an engine",
    "balance_factor": "times the mean of resident tokens up to which bounded-sticky places",
    "slack_tokens": "resident tokens above that",
    "kv_admission": "share of every KV cache from which on new sessions wait",
    "session_ttl_s": "seconds after which an unused session is forgotten",
    "engine_metrics_interval_s": "seconds between two readings of an engine's KV cache; 0: none",
    "workers": "processes that share the port",
    "max_hold_s": "seconds a request waits for an engine",
    "max_held": "requests that may wait",
    "max_held_bytes": "bytes of theirs that are kept",
    "data_paths": "further paths that go to engines, with commas between them",
    "allowed_hosts": "further names that Host may have in calls to /router/*",
    "access_log": "one JSON line a request on stderr",
}
"""Options besides the limits on heads and bodies, which say it by their names."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.router",
        description="The data plane in front of a fleet of engines. Engines are announced with PUT /router/engines.",
    )
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key to ask for")
    parser.add_argument(
        "--admin-key-env", metavar="NAME", help="the same for a key that calls which change the router need"
    )
    parser.add_argument("--ready-fd", type=int, metavar="FD", help="pipe for a line of JSON once it serves")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # for `workers.py` alone
    for name, default in RouterConfig().model_dump(exclude={"kind", "url"}).items():
        option = f"--{name.replace('_', '-')}"
        kind = default.__class__
        said = _HELP.get(name, "") + (f" (default {default})" if str(default) else "")
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, help=_HELP[name])
        else:
            parser.add_argument(option, type=kind, help=said)
    return parser


if __name__ == "__main__":
    sys.exit(main())
