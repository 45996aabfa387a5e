"""Our ASGI middleware before a small application in vLLM's place: who may call what."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import EngineError, StateError
from penstock.plugin.middleware import PenstockMiddleware


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


async def status(method: str, path: str, key: str | None, **fields: bytes) -> int:
    return (await answer(method, path, key, **fields))[0]["status"]


async def answer(
    method: str, path: str, key: str | None = None, app: Any = App, kind: str = "http", **fields: bytes
) -> list[dict[str, Any]]:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    headers += [(name.encode(), value) for name, value in fields.items()]
    scope = {"type": kind, "path": path, "headers": headers, "app": app}
    if kind == "http":
        scope["method"] = method
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


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/pause", True), ("/pause\n", True), ("/collective_rpc", True), ("/penstock/info", True), ("/anything", True),
        ("/v1/load_lora_adapter", True), ("/v1/completions", False), ("/health", False), ("/metrics", False),
    ],
)  # fmt: skip
async def test_a_web_page_controls_nothing_with_a_key_or_without(
    path: str,
    refused: bool,  # noqa: FBT001
    key: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key or "")
    for fields in ({"origin": b"http://evil"}, {"host": b"evil.example"}, {"host": b"evil.example:8000"}):
        for method in ("POST", "OPTIONS"):
            assert (await status(method, path, key, **fields) == 403) == refused, (method, fields)
    if path != "/penstock/info":
        assert await status("POST", path, key, host=b"127.0.0.1:8000") == 200


async def test_a_websocket_needs_the_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert (await answer("", "/v1/realtime", None, kind="websocket"))[0]["type"] == "websocket.close"
    assert (await answer("", "/v1/realtime", "secret", kind="websocket"))[0]["type"] != "websocket.close"


@pytest.mark.parametrize(("keys", "port"), [(["secret"], 4001), ([], None)])
async def test_the_core_has_no_port_where_there_is_no_key(keys: list[str], port: int | None) -> None:
    async def call(method: str, *args: Any) -> int:
        assert (method, args) == ("penstock_control_port", (["secret"],))
        return 4001

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(call_utility_async=call),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)),
    )
    middleware = PenstockMiddleware(behind)
    middleware._expect = lambda _: None  # type: ignore[method-assign]
    assert await middleware._control_port(engine, keys) == port


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
async def test_it_tells_which_logprobs_the_server_gives(mode: str, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def version() -> str:
        return "3"

    async def paused() -> bool:
        return False

    async def on_workers(method: str, **_: Any) -> list[None]:
        assert method == "penstock_warm_up"
        return [None]

    model = SimpleNamespace(
        get_vocab_size=lambda: 32, max_model_len=64, enable_sleep_mode=False, logprobs_mode=mode, dtype="torch.bfloat16"
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2)
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(add_request=object, process_outputs=object),
        engine_core=SimpleNamespace(add_request_async=object),
        vllm_config=SimpleNamespace(model_config=model, parallel_config=parallel, lora_config=None),
        get_weight_version=version,
        update_weight_version=version,
        is_paused=paused,
        collective_rpc=on_workers,
    )
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    start, body = await answer("GET", "/penstock/info", app=app)
    told = json.loads(body["body"])
    assert (start["status"], told["weight_version"], told["logprobs_mode"]) == (200, 3, mode)
    assert told["lora"] is False
    assert told["dtype"] == "bfloat16"


class Cores:
    """An AsyncLLM of vLLM 0.32 over several cores, which all do what is asked here once, in this order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asleep: str | None = None
        self.label = "default"
        self.loads: dict[str, Any] = {"checksum": "c", "seconds": {"load": 0.1, "checksum": 0.01}}
        self.loading = self.may_load = asyncio.Event()
        self.may_load.set()
        self.engine_core, self.output_processor = self, SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_moe=False), parallel_config=SimpleNamespace(data_parallel_size=2)
        )
        self.finish_weight_update = None

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self.done.append(" ".join(map(str, (method, *args))))
        return self.asleep if method == "penstock_check_awake" else None

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:  # noqa: FBT001 - as vLLM has it
        self.done.append(f"pause {mode} {clear_cache}")

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.done.append(f"{method}{args or ''}")
        if method == "penstock_load":
            self.loading.set()
            await self.may_load.wait()
        return [4 if method == "penstock_prepared" else self.loads] * 2

    async def update_weight_version(self, label: str) -> None:
        self.done.append(f"label {label}")
        self.label = label

    async def get_weight_version(self) -> str:
        return self.label


ROUND = {"version": 4, "clear_cache": True}


async def test_a_round_over_several_cores_holds_them_before_it_pauses_them() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    assert (await middleware._apply(cores, ROUND))["version"] == 4
    assert cores.done == [
        "penstock_check_awake", "penstock_prepared", "penstock_weights_are_out", "pause keep True",
        "penstock_load(4,)", "label 4", "penstock_weights_are_in",
    ]  # fmt: skip


async def test_whether_a_round_over_several_cores_kept_the_cache_is_known_until_the_next() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    await middleware._apply(cores, ROUND | {"clear_cache": False})
    assert await middleware._kept_under(cores) == 4
    await middleware._apply(cores, ROUND)
    assert await middleware._kept_under(cores) is None


async def test_a_round_over_several_cores_that_sleep_changes_nothing() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    cores.asleep = "the engine's weights are asleep"
    with pytest.raises(StateError, match="the engine's weights are asleep"):
        await middleware._apply(cores, ROUND)
    assert cores.done == ["penstock_check_awake"]


async def test_a_sleep_waits_for_a_round_that_loads() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    cores.loading, cores.may_load = asyncio.Event(), asyncio.Event()
    middleware._spans.pausing.install(cores)
    update = asyncio.create_task(middleware._apply(cores, ROUND))
    await cores.loading.wait()
    sleep = asyncio.create_task(cores.sleep_async(1, "keep"))
    for _ in range(10):
        await asyncio.sleep(0)
    cores.may_load.set()
    await asyncio.gather(update, sleep)
    assert cores.done[-2:] == ["penstock_weights_are_in", "penstock_sleep 1 keep"]


async def test_an_error_that_nobody_foresaw_ends_a_round_over_several_cores_as_what_it_is() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    cores.loads = {"fault": "RuntimeError: CUDA error"}
    with pytest.raises(EngineError, match="RuntimeError: CUDA error"):
        await middleware._apply(cores, ROUND)
    assert "penstock_weights_are_in" not in cores.done


async def test_a_pause_leaves_the_cache_of_processed_images_alone() -> None:
    cores = Cores()  # without vLLM's renderer, which has the sending half
    PenstockMiddleware(behind)._spans.pausing.install(cores)
    await cores.pause_generation(mode="keep", clear_cache=True)
    assert cores.done == ["penstock_pause keep True"]


async def test_a_label_that_is_no_version_is_named() -> None:
    cores = Cores()
    cores.label = "step-100"
    with pytest.raises(StateError, match=r"labelled 'step-100', and a version is a whole number; relabel them by"):
        await PenstockMiddleware(behind)._current_version(cores)
