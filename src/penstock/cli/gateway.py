"""`penstock gateway`: serves an agent's API calls from a fleet, and keeps exact token rows."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import Host, Port, check_port, require_extra, run_until_signal
from penstock.errors import ConfigError, EngineHTTPError, PenstockError, UserError

if TYPE_CHECKING:
    from penstock.gateway.service import Tenant

_INFO_S = 30.0
_UNAUTHORIZED, _NOT_FOUND = 401, 404


def gateway(
    url: Annotated[str, typer.Argument(metavar="URL", help="Router of a fleet, or one engine.", show_default=False)],
    *,
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder or hub name of the model's tokenizer.", show_default=False)
    ],
    host: Host = "127.0.0.1",
    port: Port = 8080,
    policy: Annotated[
        str, typer.Option(help="extend: sampled tokens stay; faithful: each prompt as the template renders it.")
    ] = "extend",
    temperature: Annotated[
        float | None, typer.Option(help="Instead of what a harness asks for.", min=0.0, show_default=False)
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="vLLM's parser of tool calls, instead of our own.", show_default=False),
    ] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option(metavar="NAME", help="vLLM's parser of reasoning.", show_default=False)
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML: NAME: {key, max_turns, max_tokens, max_seconds}.", show_default=False),
    ] = None,
    router_key: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="Key of the router; rather by the variable.")
    ] = None,
) -> None:
    """Serve chat completions, Responses and Anthropic messages for any agent, until Ctrl-C.

    Its key is PENSTOCK_GATEWAY_KEY, unless `--tenants` gives several keys.

    **Examples**

    - `PENSTOCK_GATEWAY_KEY=... penstock gateway http://127.0.0.1:8000 --tokenizer Qwen/Qwen3-0.6B`
    - `penstock gateway http://127.0.0.1:8000 --tokenizer ./checkpoint --policy faithful --tenants tenants.yaml`

    Harnesses call BASE/v1 with a session's key. For rows and rewards, see docs/how-to/agents.md.
    """
    require_extra("gateway", "starlette", "uvicorn", "transformers")
    from penstock.fleet.service import router_address  # noqa: PLC0415

    if policy not in {"extend", "faithful"}:
        raise UserError(f"--policy is extend or faithful, got {policy!r}")
    address, found = router_address(url), _tenants(tenants)
    check_port(host, port)
    sampling: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    options: dict[str, Any] = {"policy": policy, "sampling": sampling}
    parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    run_until_signal(
        _serve(address, tokenizer, found, router_key or None, host=host, port=port, options=options, parsers=parsers)
    )


def _tenants(file: Path | None) -> list[Tenant]:
    """Read the tenants from a file, or the default tenant's key from the environment."""
    from penstock.checks import reading  # noqa: PLC0415
    from penstock.config import read_keys  # noqa: PLC0415
    from penstock.gateway.graph import Limits  # noqa: PLC0415
    from penstock.gateway.service import Tenant  # noqa: PLC0415
    from penstock.options import validate  # noqa: PLC0415

    if file is None:
        key = os.environ.get("PENSTOCK_GATEWAY_KEY")
        if not key:
            raise UserError("the gateway needs a key: set PENSTOCK_GATEWAY_KEY, or give --tenants FILE")
        return [Tenant("default", key)]
    with reading(f"tenants in {file}", ConfigError):
        entries = read_keys(file, "--tenants")
        for name, entry in entries.items():
            if not isinstance(entry, dict):
                raise ConfigError(f"tenant {name!r} in {file} needs fields, such as `{name}: {{key: KEY}}`")
            if not isinstance(entry["key"], str) or not entry["key"]:
                raise ConfigError(f"the key of tenant {name!r} in {file} must be a text, got {entry['key']!r}")
        return [Tenant(name, entry.pop("key"), validate(Limits, entry)) for name, entry in entries.items()]


async def _serve(
    url: str,
    tokenizer: str,
    tenants: list[Tenant],
    router_key: str | None,
    *,
    host: str,
    port: int,
    options: dict[str, Any],
    parsers: dict[str, str | None],
) -> None:
    from penstock.engine.client import DataClient  # noqa: PLC0415
    from penstock.gateway.app import serving  # noqa: PLC0415
    from penstock.gateway.service import Gateway  # noqa: PLC0415
    from penstock.gateway.turn import GatewayOptions  # noqa: PLC0415
    from penstock.process import raise_file_limit  # noqa: PLC0415
    from penstock.rollout.chat_template import ChatTemplate  # noqa: PLC0415
    from penstock.rollout.tokenizer import load_tokenizer  # noqa: PLC0415
    from penstock.rollout.vllm_parser import output_parser  # noqa: PLC0415

    template = ChatTemplate(await asyncio.to_thread(load_tokenizer, tokenizer))
    parser = await asyncio.to_thread(output_parser, template.tokenizer, **parsers)
    raise_file_limit()
    client = DataClient(url, api_key=router_key)
    try:
        model, context = await _model(client)
        kept = Gateway(client, template, GatewayOptions(model, context, **options), tenants, parser=parser)
        if kept.codec.template_faults and options["policy"] == "extend":
            typer.echo(f"policy faithful: the template cannot be extended ({kept.codec.template_faults[0]})", err=True)
        gc.collect()
        gc.freeze()  # else each full collection walks all objects of transformers, and all turns wait
        gc.set_threshold(700, 10, 1000)  # collections of sessions' objects can be rare, since these have no circles
        async with serving(kept, host=host, port=port) as base:
            typer.echo(f"ready: gateway to {model} at {base}, policy {kept.policy}\nCtrl-C stops it.")
            with suppress(asyncio.CancelledError):  # the end by a signal is a server's usual end
                await asyncio.Event().wait()
    finally:
        await client.close()


async def _model(client: Any) -> tuple[str, int]:
    """Return the name and the context length of the model behind a router.

    Raises:
        PenstockError: nothing answers there, or it serves no model; `UserError`: it requires another key.
    """
    from penstock.checks import reading  # noqa: PLC0415
    from penstock.http import UnreachableError  # noqa: PLC0415

    try:
        answer = await client.http.get("/v1/models", timeout_s=_INFO_S)
    except UnreachableError as error:
        start = "start a fleet, such as `penstock serve MODEL`, and give the address that it prints"
        raise PenstockError(f"nothing answers at {client.http.url}: {start}") from error
    except EngineHTTPError as error:
        if error.status == _NOT_FOUND:
            give = "give the address of a fleet, as `penstock serve` printed it, or of an engine"
            raise PenstockError(f"{client.http.url} serves no model: {give}") from error
        if error.status != _UNAUTHORIZED:
            raise
        asks = f"{client.http.url} asks for its API key"
        raise UserError(f"{asks}: set PENSTOCK_API_KEY to it, or give --router-key") from error
    with reading("answer to /v1/models", ConfigError):
        first = answer["data"][0]
        return str(first["id"]), int(first["max_model_len"])
