"""`penstock tinker-api`: a further API process on the database of a Tinker service."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import check_port, require_extra, run_until_signal

if TYPE_CHECKING:
    from penstock.tinker.service_state import Options


def tinker_api(
    *,
    database: Annotated[str, typer.Option(metavar="URL", help="SQLAlchemy's, the service's own.", show_default=False)],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="The service's data folder.")] = Path("tinker-data"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8766,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML: NAME: {key, max_queued}; default: any key.", show_default=False),
    ] = None,
) -> None:
    """Serve the futures and samples of a running `penstock tinker` from another process, until Ctrl-C.

    It samples by itself, over the engines that the database names; operations on models are left to the service.

    **Example**

    - `penstock tinker-api --database sqlite:///tinker-data/service.db --port 8766`
    """
    require_extra("tinker", "tinker", "sqlalchemy", "alembic", "starlette", "uvicorn")
    from penstock.tinker.service_state import Options  # noqa: PLC0415
    from penstock.tinker.tenants import read_keys  # noqa: PLC0415

    check_port(host, port)
    name = f"{socket.gethostname()}-{os.getpid()}"
    options = Options(data=data.resolve(), database=database, tenants=read_keys(keys), name=name)
    run_until_signal(_serve(options, host, port))


async def _serve(options: Options, host: str, port: int) -> None:
    import asyncio  # noqa: PLC0415

    from penstock.tinker.server import serving  # noqa: PLC0415

    async with serving(options, host=host, port=port) as url:
        typer.echo(f"ready: Tinker API at {url}\nCtrl-C stops it.")
        await asyncio.Event().wait()
