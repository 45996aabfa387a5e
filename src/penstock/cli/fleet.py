"""`penstock fleet`: adds, drains and removes engines of a running fleet, and stops the fleet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli.common import run_until_signal, waiting
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.fleet.remote import FleetClient
    from penstock.fleet.service import FleetState

T = TypeVar("T")

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="Address that `penstock serve` printed; default: your only fleet here.", show_default=False
    ),
]
Name = Annotated[str, typer.Argument(metavar="ENGINE", help="Its name, as `status` shows it.", show_default=False)]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", help="Seconds it may go on with what it has; default: fleet.drain_timeout_s.", min=0.0),
]

fleet = typer.Typer(
    name="fleet",
    help="Change the engines of a fleet of `penstock serve`, `penstock train` or a program, while it serves.",
    invoke_without_command=True,
)


@fleet.command()
def add(
    count: Annotated[
        int | None, typer.Argument(metavar="N", help="How many; default: 1.", min=1, show_default=False)
    ] = None,
    *,
    attach: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Start none; take this server, which runs already. #dp=N behind it: its DP ranks one by one.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Start more engines, or attach running servers. They serve once they have the fleet's weights.

    **Examples**

    - `penstock fleet add`
    - `penstock fleet add 2 --url http://127.0.0.1:9000`
    - `penstock fleet add --attach http://10.0.0.5:8000`
    """
    if attach and count is not None:
        raise UserError(f"{count} to start and servers to --attach are two calls; give one of them")

    async def join(client: FleetClient) -> tuple[list[str], FleetState]:
        names = await (client.call("attach", servers=attach) if attach else client.call("add", count=count or 1))
        return names, await client.state()

    names, state = _run(url, join, f"attaching {', '.join(attach)}" if attach else f"starting {count or 1} more")
    waiting = [m.name for m in state.members if m.name in names and m.state == "syncing"]
    if serving := [name for name in names if name not in waiting]:
        typer.echo(f"serving: {', '.join(serving)}")
    if waiting:
        typer.echo(f"waiting for weights of version {state.version}: {', '.join(waiting)}")


@fleet.command()
def drain(engine: Name, *, timeout: Timeout = None, url: Url = None) -> None:
    """Send an engine no new session, and wait until its requests are done. It stays in the fleet; see `remove`.

    Ctrl-C only ends the wait. Exit status 1: requests or sessions were left when the time was over.

    **Examples**

    - `penstock fleet drain e1`
    - `penstock fleet drain e1 --timeout 60`
    """
    from penstock.fleet.lifecycle import SERVABLE  # noqa: PLC0415

    async def wait(client: FleetClient) -> bool:
        state = await client.state()
        most_s = state.drain_timeout_s if timeout is None else timeout
        if any(engine == member.name and member.state in SERVABLE for member in state.members):
            typer.echo(f"draining {engine}: its requests and sessions have {most_s:g} s to end", err=True)
        return await client.call("drain", engine=engine, timeout_s=timeout)

    done = _run(url, wait, f"draining {engine}")
    typer.echo(f"{engine} is drained" if done else f"{engine} still has requests or sessions", err=not done)
    if not done:
        raise typer.Exit(1)


@fleet.command()
def remove(engine: Name, *, timeout: Timeout = None, url: Url = None) -> None:
    """Drain an engine and end it. Requests that are unfinished by then continue on other engines.

    **Examples**

    - `penstock fleet remove e1`
    """
    _run(url, lambda client: client.call("remove", engine=engine, timeout_s=timeout), f"removing {engine}")
    typer.echo(f"{engine} has left")


@fleet.command()
def stop(url: Url = None) -> None:
    """End a fleet, its engines and its router.

    **Examples**

    - `penstock fleet stop`
    - `penstock fleet stop --url http://127.0.0.1:9000`
    """
    _run(url, lambda client: client.call("stop"), "stopping")
    typer.echo("stopped")


def _run(url: str | None, call: Callable[[FleetClient], Awaitable[T]], what: str) -> T:
    """Return the fleet's answer to a call. A terminal shows `what` during the call."""
    from rich.console import Console  # noqa: PLC0415

    from penstock.fleet.remote import FleetClient  # noqa: PLC0415

    async def run() -> T:
        async with FleetClient.to(url) as client:
            await client.state()  # finds a process that hangs; the call itself has no such deadline
            with waiting(what, Console(stderr=True)):
                return await call(client)

    return run_until_signal(run())
