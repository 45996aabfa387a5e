"""`python -m penstock.router`: the router as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop

from penstock.checks import parse_json
from penstock.errors import ConfigError, PenstockError, UserError
from penstock.lifeline import watch_lifeline
from penstock.options import validate
from penstock.process import raise_file_limit
from penstock.rooms import plugged_in
from penstock.router.server import Router
from penstock.router_settings import ADMIN_KEY_ENV, KEY_ENV, RouterConfig
from penstock.start_report import StartReport, error_to_json

_SWITCH_S = 0.0005
"""Seconds for which the event loop keeps the interpreter while a thread with a control call waits for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM. Exit status 2: a user's error; 1: any other."""
    watch_lifeline()
    given = _parser().parse_args(arguments)
    report = StartReport(given.ready_fd)

    def ready(url: str) -> None:
        _print(1, f"penstock router ready on {url}\n")
        report.give({"url": url})

    try:
        config = validate(RouterConfig, parse_json(given.options, "the options of the router", ConfigError))
        keys = os.environ.get(KEY_ENV) or None, os.environ.get(ADMIN_KEY_ENV) or None
        if config.access_log:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
        raise_file_limit()
        _keep_freed_memory()
        sys.setswitchinterval(_SWITCH_S)
        for room in ("router.memory", "router.own_calls"):
            plugged_in(room)  # now, since a process without a free descriptor can load nothing
        if config.workers > 1:
            router: Router = plugged_in("router.workers")(config, *keys, ready)  # returns in each of the workers
            uvloop.run(_serve(router))
        else:
            uvloop.run(_serve(Router(config, api_key=keys[0], admin_key=keys[1]), ready))
    except PenstockError as error:
        report.give({"error": error_to_json(error)})
        _print(2, f"penstock router: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    return 0


def _print(fd: int, line: str) -> None:
    """Write a line for people; ignore a full disk, which must not end the router."""
    with suppress(OSError):
        os.write(fd, line.encode())


async def _serve(router: Router, ready: Callable[[str], object] = bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await router.start()
        ready(router.url)
        await stop.wait()
    finally:
        await router.close()


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt(3)."""


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory, to save page faults for bodies.

    This halves the cost of a 200 KB prompt. Other C libraries have no `mallopt` and do not need it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 64 << 20), (_M_TOP_PAD, 16 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.router",
        description="The data plane in front of a fleet of engines. Engines are announced with PUT /router/engines.",
        epilog=f"{KEY_ENV} is asked of clients, {ADMIN_KEY_ENV} for calls that change the router.",
    )
    parser.add_argument("options", nargs="?", default="{}", help="fields of RouterConfig, as JSON")
    parser.add_argument("--ready-fd", type=int, metavar="FD", help="pipe for a line of JSON once it serves")
    return parser


if __name__ == "__main__":
    sys.exit(main())
