"""`penstock sim`: one simulated engine, for writing and testing clients and fleets."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from penstock.cli.common import Host, Port, check_port


def sim(
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="How the engine is built.", show_default=False)
    ] = None,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="What callers must send.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="What goes wrong, as in the example; repeatable.")] = None,
) -> None:
    """Run one simulated engine: vLLM's HTTP, deterministic tokens, faults on demand. No model, no GPU.

    **Examples**

    - `penstock sim`
    - `penstock sim --port 9000 tokens_per_second=200 max_model_len=2048 kv_blocks=256`
    - `penstock sim --fault hang:phase=pause --fault exit:phase=tokens,after_tokens=500`

    Keys: the fields of `penstock.sim.config.SimConfig`. For a fleet: `penstock serve any-name --sim --engines 4`.
    """
    from penstock.sim.__main__ import serve  # noqa: PLC0415
    from penstock.sim.config import SimConfig  # noqa: PLC0415

    given = [*(options or []), *(f"fault={one}" for one in fault or [])]
    config = SimConfig.read(given, host=host, port=port, api_key=api_key or None)
    check_port(host, port)

    asyncio.run(
        serve(config, lambda url: typer.echo(f"ready: simulated engine {config.served_model_name} at {url}/v1"))
    )
    typer.echo("stopped")
