"""Our ASGI middleware before a small application in vLLM's place: who may call what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.vllm_plugin.middleware import PenstockMiddleware


async def behind(scope: dict[str, Any], receive: Any, send: Any) -> None:  # noqa: ARG001
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class App:
    """What vLLM 0.32 has that the middleware asks for."""

    class state:  # noqa: N801
        class engine_client:  # noqa: N801
            update_weight_version = finish_weight_update = collective_rpc = renderer = object
            output_processor = SimpleNamespace(add_request=object, process_outputs=object)
            engine_core = SimpleNamespace(add_request_async=object, call_utility_async=object)
            vllm_config = SimpleNamespace(model_config=None)


async def status(method: str, path: str, key: str | None) -> int:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": App}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await PenstockMiddleware(behind)(scope, receive, send)
    return sent[0]["status"]


GUARDED = [
    ("POST", "/collective_rpc"),
    ("POST", "/pause"),
    ("POST", "/update_weights"),
    ("POST", "/tokenize"),
    ("POST", "/v1/completions"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_nobody_controls_an_engine_without_its_key(method: str, path: str, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert [await status(method, path, key) for key in (None, "wrong", "", "secret")] == [401, 401, 401, 200]


async def test_our_own_routes_ask_for_it_too(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert await status("POST", "/penstock/weights/apply", None) == 401
    assert await status("POST", "/penstock/weights/apply", "secret") == 400  # the body lacks a version


async def test_probes_need_no_key_and_without_one_nobody_is_asked(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert await status("GET", "/health", None) == 200
    assert await status("OPTIONS", "/v1/completions", None) == 200, "a browser's preflight carries none"
    monkeypatch.delenv("VLLM_API_KEY")
    assert await status("POST", "/pause", None) == 200
