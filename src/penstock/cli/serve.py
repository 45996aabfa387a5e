"""`penstock serve`: engines of one model behind one OpenAI endpoint."""

from __future__ import annotations

import asyncio
import json
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.common import (
    Cpu,
    Gpu,
    Host,
    Model,
    Port,
    callable_url,
    check_engine,
    check_port,
    log_to,
    only_one,
    run_config,
    run_until_signal,
    waiting,
)

if TYPE_CHECKING:
    from penstock.config import RunConfig

SECTIONS = ("engine", "fleet", "router")


def serve(
    context: typer.Context,
    model: Model,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the engines.", show_default=False)
    ] = None,
    *,
    engines: Annotated[
        int | None,
        typer.Option(help="How many engines to start; default: 1, with --attach none.", min=0, show_default=False),
    ] = None,
    attach: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A server of this model that runs already, besides --engines; #dp=N: its ranks one by one.",
            show_default=False,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    router: Annotated[
        str, typer.Option(metavar="KIND", help="penstock, or vllm-router: one that runs at router.url.")
    ] = "penstock",
    launcher: Annotated[
        str, typer.Option(metavar="KIND", help="local, or ray: engines under Ray actors, on any node of a cluster.")
    ] = "local",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PENSTOCK_API_KEY", help="What callers must send; rather by the variable: ps shows options."
        ),
    ] = None,
    cpu: Cpu = False,
    gpu: Gpu = False,
    sim: Annotated[bool, typer.Option("--sim", help="The simulated engine; no model is loaded.")] = False,
) -> None:
    """Serve a model on several engines behind one OpenAI endpoint, until Ctrl-C or `penstock fleet stop`.

    Without `--cpu`, `--gpu` or `--sim`, engines run on GPUs if there are any, else on the CPU.

    **Examples**

    - `penstock serve Qwen/Qwen3-0.6B --engines 2`
    - `penstock serve ./checkpoint --engines 2 --cpu max_model_len=512`
    - `penstock serve Qwen/Qwen3-8B --engines 4 tensor_parallel_size=2 router.policy=round-robin`
    - `penstock serve Qwen/Qwen3-8B --attach http://10.0.0.5:8000 --attach 'http://10.0.0.6:8000#dp=2'`
    - `nohup penstock serve Qwen/Qwen3-8B --engines 4 >serve.log 2>&1 &` (it outlives the shell)
    - `penstock serve Qwen/Qwen3-8B --engines 4 --launcher ray fleet.ray_address=auto` (on the nodes of a Ray cluster)

    Keys and their meaning: docs/reference/configuration.md. `extra_args.NAME=VALUE` passes any other option to vLLM.
    """
    profile, count = only_one(cpu=cpu, gpu=gpu, sim=sim), int(not attach) if engines is None else engines
    of_engine = {"engine.model": ("MODEL", model), "engine.profile": (f"--{profile}", profile)}
    of_fleet = {"fleet.engines": ("--engines", count), "fleet.launcher": ("--launcher", launcher)}
    of_router = {"router.kind": ("--router", router), "router.host": ("--host", host), "router.port": ("--port", port)}
    flags = {**of_engine, **of_fleet, **of_router, "fleet.attach": ("--attach", attach or [])}
    config = run_config(context, flags, options or [], SECTIONS)
    _check(config, api_key or None)
    run_until_signal(_serve(config, api_key or None))


def _check(config: RunConfig, api_key: str | None) -> None:
    """Refuse a config that cannot start."""
    from penstock.router_settings import refuse_open_host  # noqa: PLC0415

    if config.router.url is None:
        refuse_open_host(config.router.host, api_key)
        check_port(config.router.host, config.router.port)
    if config.fleet.launcher == "local" and config.fleet.engines:  # other nodes may have another device or model
        check_engine(config.engine)


async def _serve(config: RunConfig, api_key: str | None) -> None:
    from rich.console import Console  # noqa: PLC0415

    from penstock.fleet.fleet import Fleet  # noqa: PLC0415
    from penstock.fleet.service import socket_of  # noqa: PLC0415

    console = Console(stderr=True)
    log_to(console)
    count = config.fleet.engines + len(config.fleet.attach)
    what = f"{count} engine{'' if count == 1 else 's'} of {config.engine.model}"
    opening = Fleet.launch(config.engine, fleet=config.fleet, router=config.router, api_key=api_key)
    with waiting(f"starting {what}", console):
        fleet = await opening
    async with fleet:
        ordered = socket_of(fleet.url) is not None
        url, everywhere = callable_url(fleet.url)
        usage = _usage(url, config, with_key=api_key is not None, ordered=ordered)
        listens = "listening on all addresses of this machine\n" if everywhere else ""
        stops = f"Ctrl-C{f' or penstock fleet stop --url {url}' if ordered else ''} stops everything."
        typer.echo(f"ready: {what} at {url}/v1\n{listens}{usage}{stops}")
        # Serving normally ends by a signal or by `penstock fleet stop`.
        with suppress(asyncio.CancelledError):
            await fleet.endpoint.stopping.wait()
        console.print("stopping")


def _usage(url: str, config: RunConfig, *, with_key: bool, ordered: bool) -> str:
    """Return the user's next commands. `ordered`: `penstock fleet` finds the fleet."""
    body = {"model": config.engine.served_model_name or config.engine.model, "prompt": "Hello", "max_tokens": 16}
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if with_key else ""
    status = f"  penstock status {url}\n" if ordered or config.router.kind == "penstock" else ""
    return (
        f"\n  curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}\n"
        f"{status}\n"
    )
