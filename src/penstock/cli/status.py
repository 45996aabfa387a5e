"""`penstock status`: what the engines behind a router are doing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import AsJson, table_of
from penstock.errors import EngineDeadError, EngineHTTPError, PenstockError

if TYPE_CHECKING:
    from penstock.fleet.service import FleetState
    from penstock.router.admin_client import EngineLoad, RouterState

UNAUTHORIZED, NOT_FOUND = 401, 404
DEFAULT_URL = "http://127.0.0.1:8000"
COLUMNS = ("engine", "state", "version", "requests", "sessions", "tokens", "KV", "address")


def status(
    url: Annotated[str, typer.Argument(help="Address that `penstock serve` printed.")] = DEFAULT_URL,
    *,
    api_key: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="The key that `penstock serve` was given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the engines behind a router: state, weight version, requests in flight and resident tokens.

    **Examples**

    - `penstock status`
    - `penstock status http://127.0.0.1:9000 --json`
    """
    from penstock.fleet.service import router_address  # noqa: PLC0415

    report = asyncio.run(_collect(router_address(url), api_key or None))
    if as_json:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(report, indent=2))
    else:
        _print_table(report)


async def _collect(url: str, api_key: str | None) -> dict[str, Any]:
    """Ask the router, and the fleet's owner where it is here."""
    from dataclasses import asdict  # noqa: PLC0415

    from penstock.router.admin_client import RouterAdmin  # noqa: PLC0415

    fleet = await _fleet_state(url)
    admin = RouterAdmin(url, api_key if fleet is None else fleet.admin_key)
    try:
        state = await admin.engines()
    except EngineDeadError as error:
        raise PenstockError(f"nothing answers at {url}; is `penstock serve` running there?") from error
    except EngineHTTPError as error:
        why = {UNAUTHORIZED: "asks for its API key: set PENSTOCK_API_KEY to it", NOT_FOUND: "is no router of Penstock"}
        if error.status not in why:
            raise
        other = f"behind vllm-router, `penstock fleet list --url {url}` shows the engines"
        raise PenstockError(f"{url} {why[error.status]}; {other}") from error
    finally:
        await admin.close()
    paused = {member.url for member in (fleet.members if fleet else ()) if member.state == "paused"}
    engines = [{**asdict(load), "state": _state(load, state, paused=load.url in paused)} for load in state.engines]
    return {"url": url, **asdict(state), "engines": engines + _not_routed(fleet, state)}


async def _fleet_state(url: str) -> FleetState | None:
    """The state of a fleet that a process of this user owns on this machine; None where there is none."""
    from penstock.fleet.remote import FleetClient  # noqa: PLC0415

    try:
        async with FleetClient.to(url) as client:
            return await client.state()
    except PenstockError:
        return None


def _not_routed(fleet: FleetState | None, state: RouterState) -> list[dict[str, Any]]:
    """Engines that the router does not know: those that start, died or wait for weights."""
    if fleet is None:
        return []
    known = {load.url for load in state.engines}
    rows = [(m.name, m.url, m.state, m.weight_version) for m in fleet.members if m.url not in known]
    rows = [row for row in rows if row[2] != "stopped"] + [(name, "-", "launching", 0) for name in fleet.starting]
    return [dict(zip(("name", "url", "state", "weight_version"), row, strict=True)) for row in rows]


def _state(load: EngineLoad, router: RouterState, *, paused: bool) -> str:
    if load.down:
        return "down"
    if not load.eligible:
        return "not serving"
    if paused:
        return "paused"
    if load.draining:
        return "draining"
    return "gate closed" if router.gate_closed else "serving"


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415

    table = table_of(
        f"{report['url']}: {report['requests']:,} requests so far, {report['held']} held",
        COLUMNS,
        right=set(COLUMNS) - {"engine", "state", "address"},
    )
    for engine in report["engines"]:
        table.add_row(*_cells(engine))
    Console().print(table)


def _cells(engine: dict[str, Any]) -> list[str]:
    color = {"serving": "green", "down": "red"}.get(engine["state"], "yellow")
    load = ["-"] * 4
    if "outstanding" in engine:
        kv = "-" if engine["kv_usage"] < 0 else f"{engine['kv_usage']:.0%}"
        load = [*(f"{engine[name]:,}" for name in ("outstanding", "sessions", "resident_tokens")), kv]
    address = engine["url"].removeprefix("http://")
    return [engine["name"], f"[{color}]{engine['state']}[/]", str(engine["weight_version"]), *load, address]
