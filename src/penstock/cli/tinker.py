"""`penstock tinker`: a service that the Tinker SDK trains and samples on."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import check_engine, check_port, require_extra, run_until_signal, waiting
from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.tinker.service import ServiceConfig

SECTIONS = ("engine.", "fleet.", "router.", "train.")


def tinker(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub name.", show_default=False)],
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
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8765,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML: NAME: {key, max_queued}; default: any key.", show_default=False),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="SQLAlchemy's; default: SQLite in the data folder.", show_default=False),
    ] = None,
    stall_s: Annotated[
        float, typer.Option(help="Seconds after which a piece of training work hangs: the learner restarts.", min=1)
    ] = 3600.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="vLLM's CPU build.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="vLLM on GPUs.")] = False,
) -> None:
    """Serve the Tinker SDK: training of many LoRA models on one base, and sampling of all of them, until Ctrl-C.

    Clients set TINKER_BASE_URL to the address that is shown; MODEL is their `base_model`.

    **Examples**

    - `penstock tinker Qwen/Qwen3-0.6B`
    - `penstock tinker examples/models/sorter-0.8m --cpu max_model_len=512`
    - `penstock tinker Qwen/Qwen3-8B --engines 2 --keys keys.yaml max_lora_rank=64 train.micro_batch_tokens=8192`

    Each call of the SDK, and what it does here: docs/tinker.md.
    """
    require_extra("tinker", "tinker", "sqlalchemy", "alembic", "starlette", "uvicorn", "peft", "transformers")
    if cpu and gpu:
        raise UserError("--cpu and --gpu exclude each other; give one of them")
    check_port(host, port)
    profile = "cpu" if cpu else "gpu" if gpu else None
    config = _config(
        model, options or [], profile, engines, data=data, host=host, port=port, keys=keys, database=database,
        stall_s=stall_s,
    )  # fmt: skip
    check_engine(config.engine)
    run_until_signal(_serve(config))


def _config(model: str, options: list[str], profile: str | None, engines: int, **own: Any) -> ServiceConfig:
    from penstock.config import load_config  # noqa: PLC0415
    from penstock.tinker.service import ServiceConfig  # noqa: PLC0415

    flags: dict[str, Any] = {"engine.model": model, "fleet.engines": engines, "router.port": 0}
    if profile is not None:
        flags["engine.profile"] = profile
    given = [option if option.startswith(SECTIONS) else f"engine.{option}" for option in options]
    run = load_config(None, [*(f"{key}={json.dumps(value)}" for key, value in flags.items()), *given])
    return ServiceConfig(run.engine, run.fleet, run.router, run.train, **own)


async def _serve(config: ServiceConfig) -> None:
    import asyncio  # noqa: PLC0415
    from contextlib import AsyncExitStack  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from penstock.cli.serve import ConsoleHandler  # noqa: PLC0415
    from penstock.tinker.service import serving  # noqa: PLC0415

    console = Console(stderr=True)
    log = logging.getLogger("penstock")
    log.addHandler(ConsoleHandler(console))
    log.setLevel(logging.INFO)
    async with AsyncExitStack() as stack:
        with waiting(f"starting the service of {config.base_model}", console):
            service = await stack.enter_async_context(serving(config))
        typer.echo(
            f"ready: {config.base_model} at {service.url}\n\n  export TINKER_BASE_URL={service.url}\n"
            f"  penstock fleet list --url {service.fleet.url}\n\n"
            f"Ctrl-C stops everything; {config.data} keeps what was saved."
        )
        assert service.fleet.endpoint is not None  # noqa: S101 - this process launched it
        with suppress(asyncio.CancelledError):
            await service.fleet.endpoint.stopping.wait()
        console.print("stopping")
