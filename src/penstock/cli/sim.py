"""`penstock sim`: one simulated engine, to write and test clients and fleets against."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import check_port
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.sim.config import SimConfig


def sim(
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="How the engine is built.", show_default=False)
    ] = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="What callers must send.")] = None,
    fault: Annotated[list[str] | None, typer.Option(help="What goes wrong, as in the example; repeatable.")] = None,
) -> None:
    """Run one simulated engine: vLLM's HTTP, deterministic tokens, faults on demand. No model, no GPU.

    **Examples**

    - `penstock sim`
    - `penstock sim --port 9000 tokens_per_second=200 max_model_len=2048 kv_blocks=256`
    - `penstock sim --fault hang:phase=pause --fault exit:phase=tokens,after_tokens=500`

    Keys: the fields of `penstock.sim.config.SimConfig`. A fleet of them: `penstock serve any-name --sim --engines 4`.
    """
    config = _config({"host": host, "port": port, "api_key": api_key or None}, options or [], fault or [])
    check_port(host, port)
    from penstock.sim.__main__ import serve  # noqa: PLC0415

    asyncio.run(
        serve(config, lambda url: typer.echo(f"ready: simulated engine {config.served_model_name} at {url}/v1"))
    )
    typer.echo("stopped")


def _config(flags: dict[str, Any], options: list[str], faults: list[str]) -> SimConfig:
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415
    from yaml import YAMLError, safe_load  # noqa: PLC0415

    from penstock.sim.config import SimConfig  # noqa: PLC0415
    from penstock.sim.faults import Fault  # noqa: PLC0415

    known = {field.name for field in dataclasses.fields(SimConfig)} - {*flags, "faults", "tensor_specs"}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"option {option!r} is not of the form key=value")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown sim option {key!r}; {hint}")
        try:
            flags[key] = safe_load(text)
        except YAMLError:
            raise ConfigError(f"option {option!r}: the value is not valid YAML") from None
    flags["faults"] = tuple(Fault.parse(text) for text in faults)
    try:
        return TypeAdapter(SimConfig).validate_python(flags)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # SimConfig's own check of how its values go together
            raise ConfigError(first["msg"].removeprefix("Value error, ")) from None
        raise ConfigError(f"sim option {first['loc'][0]!r}: {first['msg']}, got {first['input']!r}") from None
