"""The paths of the real vLLM server: which of them the router passes on, and attacks that once got past it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, get_args

import aiohttp
import pytest
from router_rig import RawClient, request
from starlette.routing import BaseRoute

from penstock.errors import PenstockError
from penstock.guard import CONTROL_PATHS, PRIVATE_PATHS
from penstock.router.admin import DATA_PATHS
from penstock.router.memory import EngineEntry, Membership
from penstock.router.server import Router, check_data_path
from penstock.settings import RouterConfig

pytestmark = pytest.mark.vllm
BY_PREFIX = {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/adapters/{adapter_name}"}


def app_routes(monkeypatch: pytest.MonkeyPatch) -> list[BaseRoute]:
    """Routes of the server's app with everything on that can be."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    options = ["--enable-scale-out", "--enable-tokenizer-info-endpoint"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    tasks = tuple(task for kind in get_args(SupportedTask) for task in get_args(kind) or (kind,))
    return build_app(args, tasks, None).routes


def module_routes() -> list[BaseRoute]:
    """Routes of every `api_router` module, also of those that this model's app leaves out."""
    import vllm.entrypoints
    from fastapi import APIRouter

    found: list[BaseRoute] = []
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if module.name.endswith("api_router"):
            values: Iterator[Any] = iter(vars(importlib.import_module(module.name)).values())
            found += [route for value in values if isinstance(value, APIRouter) for route in value.routes]
    return found


def test_every_route_of_vllm_is_a_data_path_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {route.path for route in (*app_routes(monkeypatch), *module_routes())}
    assert {"/v1/completions", "/pause", "/weight_checker", "/classify", "/fault_tolerance/apply"} <= routes
    known = {path.decode() for path in DATA_PATHS | CONTROL_PATHS | PRIVATE_PATHS} | BY_PREFIX
    unknown = routes - known
    assert not unknown, f"add each to DATA_PATHS, CONTROL_PATHS or PRIVATE_PATHS of guard.py: {sorted(unknown)}"
    for path in routes - {path.decode() for path in DATA_PATHS}:
        with pytest.raises(PenstockError):
            check_data_path(re.sub(r"\{\w+\}", "x", path).encode())


@pytest.fixture
async def router(live):
    made = Router(RouterConfig(engine_metrics_interval_s=0))
    await made.start()
    made.dispatcher.announce(Membership(1, (EngineEntry("live", live.engine.control.url, api_key=live.key),)))
    yield made
    await made.close()


async def asked(live, path):
    key = {"Authorization": f"Bearer {live.key}"}
    async with aiohttp.ClientSession(headers=key) as session, session.get(live.engine.control.url + path) as answer:
        assert answer.status == 200
        return await answer.json()


@pytest.mark.parametrize(
    "target",
    [
        "/pause%0a", "/resume%0a", "/collective_rpc%0a", "/pause%0A", "/%70ause", "//pause", "/./pause", "/v1/../pause",
        "/pause", "/weight_checker", "/inference/v1/abort_requests", "/server_info", "/weight_info", "/penstock/info",
    ],
)  # fmt: skip
async def test_no_control_call_reaches_a_real_engine(live, router, target):
    client = await RawClient.connect(router.url)
    body = b'{"action": "reset", "method": "check_health"}'
    answer = await client.ask(target, body, "Content-Type: application/json\r\n")
    client.close()
    assert answer.status in {400, 403}
    assert answer.header("x-penstock-error") in {"bad_path", "control_call"}
    assert (await asked(live, "/is_paused"))["is_paused"] is False
    assert router.dispatcher.backends["live"].requests == 0


@pytest.mark.parametrize("connection", ["", "keep-alive,", ", close", ",,", " , x-y ,"])
async def test_no_connection_option_opens_a_head_to_what_follows_it(live, router, connection):
    smuggled = request("/pause", b"", "X: y\r\n")
    head = f"Connection: {connection}\r\nContent-Type: application/json\r\n"
    body = b'{"model": "' + str(live.model_path).encode() + b'", "prompt": [5], "max_tokens": 2}'
    client = await RawClient.connect(router.url)
    answers = [await client.ask("/v1/completions", body, head)]
    if "close" not in connection:
        answers.append(await client.ask("/v1/models", smuggled, head))
    client.close()
    assert answers[0].status == 200
    assert b'"choices"' in answers[0].body
    assert (await asked(live, "/is_paused"))["is_paused"] is False
    other = await RawClient.connect(router.url)  # on the connection that the first one used
    models = await other.ask("/v1/models", method="GET")
    other.close()
    assert models.status == 200
    assert b'"data"' in models.body
