"""Our ASGI middleware before a small application in vLLM's place: who may call what."""

from __future__ import annotations

import json
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
    return (await answer(method, path, key))[0]["status"]


async def answer(method: str, path: str, key: str | None = None, app: Any = App) -> list[dict[str, Any]]:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "app": app}
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await PenstockMiddleware(behind)(scope, receive, send)
    return sent


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


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
async def test_it_tells_which_logprobs_the_server_gives(mode: str, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def version() -> str:
        return "3"

    async def paused() -> bool:
        return False

    model = SimpleNamespace(get_vocab_size=lambda: 32, max_model_len=64, enable_sleep_mode=False, logprobs_mode=mode)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2)
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(add_request=object, process_outputs=object),
        engine_core=SimpleNamespace(add_request_async=object),
        vllm_config=SimpleNamespace(model_config=model, parallel_config=parallel),
        get_weight_version=version,
        is_paused=paused,
    )
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    start, body = await answer("GET", "/penstock/info", app=app)
    told = json.loads(body["body"])
    assert (start["status"], told["weight_version"], told["logprobs_mode"]) == (200, 3, mode)
