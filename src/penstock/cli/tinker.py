"""`penstock tinker`: a training and sampling service for the Tinker SDK. `penstock tinker-api`: more API processes."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import (
    Cpu,
    Gpu,
    Host,
    Model,
    Port,
    check_engine,
    check_port,
    log_to,
    only_one,
    require_extra,
    run_config,
    run_until_signal,
    waiting,
)

if TYPE_CHECKING:
    from penstock.tinker.service import ServiceConfig
    from penstock.tinker.service_state import Options

SECTIONS = ("engine", "fleet", "router", "train")
Keys = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML: NAME: {key, max_queued}; default: any key.", show_default=False),
]


def tinker(
    context: typer.Context,
    model: Model,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Options of the engines; train.KEY: of the learner.", show_default=False
        ),
    ] = None,
    *,
    engines: Annotated[int, typer.Option(help="How many engines to start.", min=1)] = 1,
    data: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Keeps checkpoints, futures and logs; of one service at a time.")
    ] = Path("tinker-data"),
    host: Host = "127.0.0.1",
    port: Port = 8765,
    keys: Keys = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="PENSTOCK_TINKER_DATABASE",
            show_default=False,
            help="SQLAlchemy's; default: SQLite in the data folder. With a password rather by the variable: ps shows "
            "options.",
        ),
    ] = None,
    cpu: Cpu = False,
    gpu: Gpu = False,
) -> None:
    """Serve the Tinker SDK until Ctrl-C: train many LoRA models on one base, and sample from all of them.

    Clients set TINKER_BASE_URL to the address that is shown. MODEL is their `base_model`.

    **Examples**

    - `penstock tinker Qwen/Qwen3-0.6B`
    - `penstock tinker examples/models/sorter-0.8m --cpu max_model_len=512`
    - `penstock tinker Qwen/Qwen3-8B --engines 2 --keys keys.yaml max_lora_rank=64 train.micro_batch_tokens=8192`

    docs/tinker.md lists each call of the SDK and its effect here.
    """
    require_extra("tinker", "tinker", "sqlalchemy", "starlette", "uvicorn")
    require_extra("train", "peft", "transformers")  # its learner's
    from penstock.tinker.service import ServiceConfig  # noqa: PLC0415

    profile = only_one(cpu=cpu, gpu=gpu)
    check_port(host, port)
    of_fleet = {"fleet.engines": ("--engines", engines), "router.port": ("", 0)}
    flags = {"engine.model": ("MODEL", model), "engine.profile": (f"--{profile}", profile), **of_fleet}
    run = run_config(context, flags, options or [], SECTIONS)
    config = ServiceConfig(
        run.engine, run.fleet, run.router, run.train, data=data, host=host, port=port, keys=keys, database=database,
    )  # fmt: skip
    check_engine(config.engine)
    run_until_signal(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    from contextlib import AsyncExitStack  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from penstock.tinker.service import serving  # noqa: PLC0415

    console = Console(stderr=True)
    log_to(console)
    async with AsyncExitStack() as stack:
        with waiting(f"starting the service of {config.base_model}", console):
            service = await stack.enter_async_context(serving(config))
        key = " TINKER_API_KEY=tml-anything" if config.keys is None else ""
        typer.echo(
            f"ready: {config.base_model} at {service.url}\n\n  export TINKER_BASE_URL={service.url}{key}\n"
            f"  penstock status {service.fleet.url}\n\n"
            f"Ctrl-C stops everything; {config.data} keeps what was saved."
        )
        assert service.fleet.endpoint is not None  # noqa: S101 - this process launched it
        with suppress(asyncio.CancelledError):
            await service.fleet.endpoint.stopping.wait()
        console.print("stopping")


def tinker_api(
    *,
    database: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="PENSTOCK_TINKER_DATABASE",
            help="SQLAlchemy's, the service's own.",
            show_default=False,
        ),
    ],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="The service's data folder.")] = Path("tinker-data"),
    host: Host = "127.0.0.1",
    port: Port = 8766,
    keys: Keys = None,
) -> None:
    """Serve the futures and samples of a running `penstock tinker` from another process, until Ctrl-C.

    This process samples by itself, on the engines that the database names. The service still does operations on models.

    **Example**

    - `penstock tinker-api --database sqlite:///tinker-data/service.db --port 8766`
    """
    require_extra("tinker", "tinker", "sqlalchemy", "starlette", "uvicorn")
    from penstock.tinker.service_state import Options  # noqa: PLC0415
    from penstock.tinker.tenants import read_keys  # noqa: PLC0415

    check_port(host, port)
    name = f"{socket.gethostname()}-{os.getpid()}"
    options = Options(data=data.resolve(), database=database, tenants=read_keys(keys), name=name)
    run_until_signal(_serve_api(options, host, port))


async def _serve_api(options: Options, host: str, port: int) -> None:
    from penstock.tinker.api import serving  # noqa: PLC0415

    async with serving(options, host=host, port=port) as url:
        typer.echo(f"ready: Tinker API at {url}\nCtrl-C stops it.")
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
