"""Shared by commands: options, checks before anything starts, an end by signal, a spinner."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
from collections.abc import Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.config import RunConfig
    from penstock.settings import EngineConfig

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)]
Cpu = Annotated[bool, typer.Option("--cpu", help="vLLM's CPU build.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="vLLM on GPUs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub name.", show_default=False)]

_HOW = {
    "gateway": "pip install 'penstock[gateway]'",
    "tinker": "pip install 'penstock[tinker]'",
    "train": "pip install 'penstock[train]'",
    "vllm": "pip install 'penstock[vllm]' on a machine with GPUs, or `make setup` in a checkout without one",
}


def require_extra(extra: str, *modules: str) -> None:
    """Raise UserError, with the command that installs `extra`, where one of its modules is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; {_HOW[extra]}")


def only_one(**chosen: bool) -> str | None:
    """The name of the one flag that is set; UserError: several are, and they exclude each other."""
    names = [name for name, given in chosen.items() if given]
    if len(names) > 1:
        raise UserError(f"--{names[0]} and --{names[1]} exclude each other; give one of them")
    return names[0] if names else None


def run_config(flags: Mapping[str, Any], options: Sequence[str], sections: Sequence[str]) -> RunConfig:
    """Flags and `key=value` options as one validated tree; a key of none of the `sections` is the engine's."""
    from penstock.config import load_config  # noqa: PLC0415

    named = tuple(f"{section}." for section in sections)
    given = [option if option.startswith(named) else f"engine.{option}" for option in options]
    values = (f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None)
    return load_config(None, [*values, *given])


def callable_url(url: str) -> tuple[str, bool]:
    """The address to call a server of this machine at, and whether it listens on all addresses."""
    for anywhere, here in (("://0.0.0.0:", "://127.0.0.1:"), ("://[::]:", "://[::1]:")):
        if anywhere in url:
            return url.replace(anywhere, here), True
    return url, False


def check_port(host: str, port: int) -> None:
    """Raise UserError where a server could not listen on `host` and `port`; 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} of {host} is in use; choose another, or --port 0 for any") from None
            raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def check_engine(config: EngineConfig) -> None:
    """Raise UserError where vLLM, the device or the model is missing. The simulated engine needs none of them."""
    from penstock.config import check_on_hub  # noqa: PLC0415
    from penstock.engine.launch import resolve_profile, server_command  # noqa: PLC0415

    profile = resolve_profile(config)
    if profile == "sim":
        return
    require_extra("vllm", "vllm")
    if profile == "gpu" and resolve_profile(config.model_copy(update={"profile": "auto"})) != "gpu":
        raise UserError("there is no NVIDIA device on this machine; choose --cpu (train: engine.profile=cpu)")
    server_command(config, port=0, api_key=None)  # refuses a path without a checkpoint
    if not Path(config.model).expanduser().is_dir():
        check_on_hub(config.model, "model")


T = TypeVar("T")

SAME_S = 0.5
"""Signals so close are one: a terminal's Ctrl-C comes again from a parent such as `timeout`, which passes it on."""


class Interrupted(BaseException):
    """A signal ended the coroutine. `exit_status` is the shell's convention, 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_status = 128 + number


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; the first SIGINT, SIGTERM or SIGHUP cancels it, so its context managers end what it started.

    SIGHUP, of a terminal that closes, stays ignored if it was before, as under `nohup`.

    A second signal, `SAME_S` later or more, ends this process at once; children then end by their lifelines. A `main`
    that catches the cancellation and returns has its value returned.

    Raises:
        Interrupted: `main` was cancelled by a signal.
    """
    return asyncio.run(_cancel_on_signal(main))


async def _cancel_on_signal(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[signal.Signals] = []
    watched = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        watched.append(signal.SIGHUP)

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
            loop.call_later(SAME_S, let_go)

    def let_go() -> None:
        for number in watched:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # Python's own for SIGINT cancels whatever is ending the rest

    for number in watched:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for number in watched:
            loop.remove_signal_handler(number)


def table_of(columns: Sequence[str], *, right: Collection[str]) -> Table:
    """A table without lines; columns in `right` are numbers."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


@contextmanager
def waiting(what: str, console: Console) -> Generator[None]:
    """A spinner with what is under way and for how long, until the block ends; nothing where no terminal is."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


class _ConsoleHandler(logging.Handler):
    """One line a record, above the spinner; what follows the first line comes again in the error itself."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = f"{datetime.fromtimestamp(record.created).astimezone():%H:%M:%S} {record.getMessage().splitlines()[0]}"
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def log_to(console: Console) -> logging.Logger:
    """Show what our code logs; returns its logger."""
    log = logging.getLogger("penstock")
    log.addHandler(_ConsoleHandler(console))
    log.setLevel(logging.INFO)
    return log
