"""`penstock status`: the engines behind a router, as the router and the fleet's owner see them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import callable_url
from penstock.errors import EngineError, PenstockError

if TYPE_CHECKING:
    from penstock.fleet.service import FleetState

WHY = {
    None: "nothing answers at {}; is `penstock serve` running there?",
    401: "{} asks for its API key: set PENSTOCK_API_KEY to it",
    404: "{} is a control port, an engine or another server: give the address that `penstock serve` printed; {}",
}
"""Error texts by status of the router's answer; None: no answer."""
_OF_TEXT = ("engine", "state", "address", "GPUs")
PIPE_WIDTH = 400
"""Columns of the table if the output is not a terminal. Rich would assume 80 and cut longer lines."""
LOADS = {"outstanding": "requests", "sessions": "sessions", "resident_tokens": "tokens"}


def status(
    url: Annotated[
        str | None,
        typer.Argument(
            help="Address that `penstock serve` printed; default: your only fleet here.", show_default=False
        ),
    ] = None,
    *,
    api_key: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="The key that `penstock serve` was given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the engines of a fleet: state, weight version, requests in flight, resident tokens, pid, GPUs.

    **Examples**

    - `penstock status`
    - `penstock status http://127.0.0.1:9000 --json`
    """
    report = asyncio.run(_report(url, api_key or None))
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)


async def _report(url: str | None, api_key: str | None) -> dict[str, Any]:
    """Ask the router, and the fleet's owner if it runs on this machine."""
    from dataclasses import asdict  # noqa: PLC0415

    from penstock.fleet.member import RANK  # noqa: PLC0415
    from penstock.fleet.remote import FleetClient  # noqa: PLC0415
    from penstock.fleet.service import router_address, shown  # noqa: PLC0415
    from penstock.router.state import RouterAdmin  # noqa: PLC0415

    fleet: FleetState | None = None
    router: dict[str, Any] = {}
    address, unowned = router_address(url) if url else "", ""
    try:
        async with FleetClient.to(url) as client:
            fleet = await client.state()
            address = callable_url(fleet.url)[0]
    except PenstockError as error:
        unowned = str(error)
        if not url:
            raise
    admin = RouterAdmin(address, api_key if fleet is None else fleet.admin_key)
    try:
        router = asdict(await admin.engines())
    except EngineError as error:
        if fleet is None:  # else the owner restarts the router, or uses a foreign router
            # A router asks for no key at this path; its control port does.
            is_other = "/router/health answered 401" in str(error)
            if (why := WHY.get(404 if is_other else getattr(error, "status", None))) is None:
                raise
            raise PenstockError(why.format(address, unowned)) from error
    finally:
        await admin.close()
    known = shown(fleet) if fleet is not None else {"members": (), "starting": ()}
    members: dict[str, dict[str, Any]] = {m["name"]: m for m in known["members"] if m["state"] != "stopped"}
    engines: list[dict[str, Any]] = []
    for load in router.pop("engines", ()):
        seen = "not serving" if not load["eligible"] else "draining" if load["draining"] else "serving"
        member = members.get(load["name"].partition(RANK)[0], {"state": seen})
        engines.append({**member, **load, **({"state": "down"} if load["down"] else {})})
    routed = {engine["name"].partition(RANK)[0] for engine in engines}
    engines += [member for name, member in members.items() if name not in routed]
    engines += [{"name": name, "url": "-", "state": "launching", "weight_version": 0} for name in known["starting"]]
    owner = {"pid": fleet.pid, "version": fleet.version} if fleet is not None else {}
    return {"url": address, **owner, **router, "engines": engines}


def _print(report: Mapping[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    title, engines = report["url"], report["engines"]
    if "pid" in report:
        title += f": weight version {report['version']}, owned by process {report['pid']}"
    if "held" in report:
        requests = f"{report['requests']:,} request{'s' * (report['requests'] != 1)}"
        began = datetime.fromtimestamp(report["counted_since"]).astimezone()  # a restarted router counts from 0
        title += f"; {requests} since {began:%Y-%m-%d %H:%M:%S}, {report['held']} held"
        title += ", gate closed" if report["gate_closed"] else ""
    gpus = ("GPUs",) if any(engine.get("gpus") for engine in engines) else ()
    pids = ("pid",) if any(engine.get("pid") for engine in engines) else ()
    columns = ("engine", "state", "version", *LOADS.values(), "KV", "address", *pids, *gpus)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in _OF_TEXT else "right", no_wrap=True)
    for engine in engines:
        color = {"serving": "green", "down": "red", "dead": "red"}.get(engine["state"], "yellow")
        table.add_row(
            engine["name"],
            f"[{color}]{'drained' if engine.get('drained') else engine['state']}[/]",
            str(engine["weight_version"]),
            *(f"{engine[name]:,}" if name in engine else "-" for name in LOADS),
            f"{engine['kv_usage']:.0%}" if engine.get("kv_usage", -1) >= 0 else "-",
            engine["url"].removeprefix("http://"),
            *(str(engine.get("pid") or "-") for _ in pids),
            *(",".join(engine.get("gpus", ())) for _ in gpus),
        )
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
    for engine in engines:
        if engine.get("reason") and engine["state"] != "serving":
            restarts = " (it is started again)" * (engine["state"] == "dead" and engine["is_restarting"])
            line = f"{engine['name']} {engine['state']}: {engine['reason']}{restarts}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
