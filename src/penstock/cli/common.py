"""Shared parts of the commands: options, checks before a start, the end by a signal, a spinner."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import signal
import socket
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.config import RunConfig
    from penstock.settings import EngineConfig

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)]
Cpu = Annotated[bool, typer.Option("--cpu", help="vLLM's CPU build.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="vLLM on GPUs.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub name.", show_default=False)]

_HOW = {
    "gateway": "pip install 'penstock[gateway]'",
    "tinker": "pip install 'penstock[tinker]'",
    "train": "pip install 'penstock[train]'",
    "vllm": "pip install 'penstock[vllm]' on a machine with GPUs, or `make setup` in a checkout without one",
}


def require_extra(extra: str, *modules: str) -> None:
    """Raise UserError, with the install command of `extra`, if a module is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; {_HOW[extra]}")


def only_one(**chosen: bool) -> str | None:
    """Return the name of the flag that is set, if any. UserError: several are set."""
    names = [name for name, given in chosen.items() if given]
    if len(names) > 1:
        raise UserError(f"--{names[0]} and --{names[1]} exclude each other; give one of them")
    return names[0] if names else None


def run_config(
    context: typer.Context, flags: Mapping[str, tuple[str, Any]], options: Sequence[str], sections: Sequence[str]
) -> RunConfig:
    """Build a server's config from flags and options. Keys without a section are engine keys.

    `flags` maps a key to a parameter, as the user writes it, and its value. ConfigError: an option contradicts a
    parameter that the user gave; defaults it replaces.
    """
    from penstock.config import load_config, read_override  # noqa: PLC0415

    named = tuple(f"{section}." for section in sections)
    given = [option if option.startswith(named) or "=" not in option else f"engine.{option}" for option in options]
    for option, (key, value) in zip(options, map(read_override, given), strict=True):
        section, dot, _ = option.partition("=")[0].partition(".")
        if dot and section not in (*sections, "extra_args"):
            raise UserError(f"{option!r}: a server has no section {section!r}; it has {', '.join(sections)}")
        parameter, flag = flags.get(key, ("", None))
        source = context.get_parameter_source(parameter.strip("-").lower())  # None: the command has no such parameter
        if source is not None and source.name != "DEFAULT" and value != flag:
            raise ConfigError(f"{parameter} and {option} contradict each other; give one of them")
    values = (f"{key}={json.dumps(value)}" for key, (_, value) in flags.items() if value is not None)
    return load_config(None, [*values, *given], offered=sections)


def callable_url(url: str) -> tuple[str, bool]:
    """Return the URL for local calls, and whether the server listens everywhere."""
    for anywhere, here in (("://0.0.0.0:", "://127.0.0.1:"), ("://[::]:", "://[::1]:")):
        if anywhere in url:
            return url.replace(anywhere, here), True
    return url, False


def check_port(host: str, port: int) -> None:
    """Raise UserError if a server cannot listen on `host` and `port`; 0 is any port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the server
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} of {host} is in use; choose another, or --port 0 for any") from None
            raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def check_engine(config: EngineConfig) -> None:
    """Raise UserError if vLLM, device or model is missing. A simulated engine passes."""
    from penstock.config import check_on_hub  # noqa: PLC0415
    from penstock.engine.command import resolve_profile, server_command  # noqa: PLC0415

    profile = resolve_profile(config)
    if profile == "sim":
        return
    require_extra("vllm", "vllm")
    if profile == "gpu" and resolve_profile(config.model_copy(update={"profile": "auto"})) != "gpu":
        raise UserError("there is no NVIDIA device on this machine; choose --cpu (train: engine.profile=cpu)")
    server_command(config, api_key=None)  # raises for a path without a checkpoint
    if not Path(config.model).expanduser().is_dir():
        check_on_hub(config.model, "model")


T = TypeVar("T")

SAME_S = 0.5
"""Signals within these seconds count as one. A parent such as `timeout` repeats a terminal's Ctrl-C."""


class Interrupted(BaseException):
    """A signal ended the coroutine. `exit_status` follows the shells: 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_status = 128 + number


def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` and return its value. The first SIGINT, SIGTERM or SIGHUP cancels it.

    A closing terminal sends SIGHUP. The signal stays ignored if it was ignored before, as under `nohup`.

    A second signal, at least `SAME_S` later, ends this process at once; its children then end by their lifelines. A
    cancelled `main` ends its processes by its context managers. It may still return a value, which we return.

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
            signal.signal(number, signal.SIG_DFL)  # Python's own SIGINT handler would cancel the clean-up

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


@contextmanager
def waiting(what: str, console: Console) -> Generator[None]:
    """Show a spinner, a text and the elapsed time during the block, on a terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


class _ConsoleHandler(logging.Handler):
    """Prints the first line of each record above the spinner. The error itself repeats the other lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = f"{datetime.fromtimestamp(record.created).astimezone():%H:%M:%S} {record.getMessage().splitlines()[0]}"
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def log_to(console: Console) -> logging.Logger:
    """Show the log of our code on a console. Return its logger."""
    log = logging.getLogger("penstock")
    log.addHandler(_ConsoleHandler(console))
    log.setLevel(logging.INFO)
    return log
