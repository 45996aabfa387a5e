"""The paths of the real vLLM server: which of them the router passes on, and attacks that once got past it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from starlette.routing import BaseRoute

from penstock.router.server import DATA_PATHS
from penstock.router.unserved import CONTROL_PATHS, PRIVATE_PATHS, refusal

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
    assert not unknown, f"add each to DATA_PATHS of guard.py, or to a list of unserved.py: {sorted(unknown)}"
    for path in routes - {path.decode() for path in DATA_PATHS}:
        refused = refusal(re.sub(r"\{\w+\}", "x", path).encode())
        assert refused.code == "control_call", path
