"""`python -m penstock.router`: the router as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import orjson
import uvloop

from penstock.config import RouterConfig, validate
from penstock.errors import PenstockError, UserError
from penstock.process import raise_file_limit, watch_lifeline
from penstock.router.server import Router
from penstock.router.workers import WorkerPlace, Workers, start_worker


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
        if place is not None:
            router = Router(config, api_key=keys[0], admin_key=keys[1], process=place.index)
            start = partial(start_worker, router, place, keys[0])
        elif config.workers > 1:
            router = Workers(config, keys[0], arguments)
            start = router.start
        else:
            router = Router(config, api_key=keys[0], admin_key=keys[1])
            start = router.start
        uvloop.run(_serve(router, start, pipe))
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


async def _serve(router: Router | Workers, start: Callable[[], Awaitable[object]], pipe: BinaryIO | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        started = await start()
        log_error = _print(1, f"penstock router ready on {router.url}\n")
        _report(pipe, {"url": router.url, "log_error": log_error})
        await stop.wait()
        del started
    finally:
        await router.close()


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


_PLACEMENT: Sequence[tuple[str, type, str]] = (
    ("prefix_length", int, "tokens of a shared prefix for which an engine is preferred"),
    ("overload_threshold", float, "times the mean of requests at which prefix-aware passes over an engine"),
    ("balance_factor", float, "times the mean of resident tokens up to which bounded-sticky places"),
    ("slack_tokens", int, "resident tokens above that"),
    ("kv_admission", float, "share of every KV cache from which on new sessions wait"),
    ("session_ttl_s", float, "seconds after which an unused session is forgotten"),
    ("engine_metrics_interval_s", float, "seconds between two looks at engines' health and KV caches; 0: none"),
    ("workers", int, "processes that share the port"),
)


def _parser() -> argparse.ArgumentParser:
    defaults = RouterConfig()
    parser = argparse.ArgumentParser(
        prog="python -m penstock.router",
        description="The data plane in front of a fleet of engines. Engines are announced with PUT /router/engines.",
    )
    parser.add_argument("--host", help=f"address to listen on (default {defaults.host})")
    parser.add_argument("--port", type=int, help="port to listen on (default: any free one)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key to ask for")
    parser.add_argument("--ready-fd", type=int, metavar="FD", help="pipe to say on, in a line of JSON, that it serves")
    parser.add_argument(
        "--admin-key-env", metavar="NAME", help="the same for a key that calls which change the router need"
    )
    parser.add_argument("--worker", type=WorkerPlace.parse, help=argparse.SUPPRESS)  # for `workers.py` alone
    parser.add_argument("--policy", help=f"or several, with commas between them (default {defaults.policy})")
    for name, kind, what in _PLACEMENT:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=f"{what} (default {getattr(defaults, name):g})"
        )
    parser.add_argument(
        "--max-hold-s", type=float, help=f"seconds a request waits for an engine (default {defaults.max_hold_s:g})"
    )
    parser.add_argument("--max-held", type=int, help=f"requests that may wait (default {defaults.max_held})")
    parser.add_argument(
        "--max-held-bytes", type=int, help=f"bytes of theirs that are kept (default {defaults.max_held_bytes})"
    )
    parser.add_argument("--max-header-bytes", type=int, help=f"(default {defaults.max_header_bytes})")
    parser.add_argument("--max-body-bytes", type=int, help=f"(default {defaults.max_body_bytes})")
    parser.add_argument("--header-timeout-s", type=float, help=f"(default {defaults.header_timeout_s:g})")
    parser.add_argument("--body-timeout-s", type=float, help=f"(default {defaults.body_timeout_s:g})")
    parser.add_argument("--data-paths", help="further paths that go to engines, with commas between them")
    parser.add_argument("--allowed-hosts", help="further names that Host may have in calls to /router/*")
    parser.add_argument("--access-log", action=argparse.BooleanOptionalAction, help="one JSON line a request on stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
