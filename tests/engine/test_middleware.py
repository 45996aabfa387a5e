"""Our ASGI middleware before a small application in vLLM's place: who may call what."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from penstock.errors import WeightsError
from penstock.plugin import INSTANCE_VARIABLE
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


def app_of(engine: Any, **more: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(engine_client=engine, **more))


async def answer(
    method: str,
    path: str,
    key: str | None = None,
    app: Any = App,
    kind: str = "http",
    body: bytes = b"{}",
    **fields: bytes,
) -> list[dict[str, Any]]:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    headers += [(name.encode(), value) for name, value in fields.items()]
    scope = {"type": kind, "path": path, "headers": headers, "app": app}
    if kind == "http":
        scope["method"] = method
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await PenstockMiddleware(behind)(scope, receive, send)
    return sent


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
            assert ((await answer(method, path, key, **fields))[0]["status"] == 403) == refused, (method, fields)
    if path != "/penstock/info":
        assert (await answer("POST", path, key, host=b"127.0.0.1:8000"))[0]["status"] == 200


async def test_a_server_that_listens_everywhere_is_not_named_none() -> None:
    args = SimpleNamespace(host=None, api_key=None)
    app = app_of(App.state.engine_client, args=args)
    refused = await answer("POST", "/pause", app=app, host=b"none")
    assert refused[0]["status"] == 403
    args.host = "Engine7"
    assert (await answer("POST", "/pause", app=app, host=b"engine7"))[0]["status"] == 200


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/penstock/weights/label", {"version": "x"}, "'version' in the body must be int, got 'x'"),
        ("/penstock/weights/label", {"version": True}, "'version' in the body must be int, got True"),
        ("/penstock/adapters/load", {"name": ["a"]}, "'name' in the body must be str, got ['a']"),
        ("/penstock/adapters/unload", {"name": ["a"]}, "'name' in the body must be str, got ['a']"),
    ],
)
async def test_a_field_of_another_type_is_named(path: str, body: dict[str, Any], why: str) -> None:
    app = app_of(Cores(), openai_serving_models=None)
    sent = await answer("POST", path, app=app, body=orjson.dumps(body))
    assert (sent[0]["status"], orjson.loads(sent[1]["body"])) == (400, {"error": why})


async def test_a_websocket_needs_the_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert (await answer("", "/v1/realtime", None, kind="websocket"))[0]["type"] == "websocket.close"
    assert (await answer("", "/v1/realtime", "secret", kind="websocket"))[0]["type"] != "websocket.close"


class Cores:
    """An AsyncLLM of vLLM 0.32 over two cores; each does what is asked here, in this order."""

    def __init__(self, cores: int = 2) -> None:
        self.done: list[str] = []
        self.label = "default"
        self.replies: dict[str, Any] = {}
        """What the second core replies to a step."""
        self.loading = self.may_load = asyncio.Event()
        self.may_load.set()
        self.engine_core = self
        self.core_engines = list(range(cores))
        self.output_processor = SimpleNamespace(add_request=object, process_outputs=object)
        self.add_request_async = self.finish_weight_update = None
        model = SimpleNamespace(
            is_moe=False, get_vocab_size=lambda: 32, max_model_len=64, enable_sleep_mode=False,
            logprobs_mode="processed_logprobs", dtype="torch.bfloat16", model="nowhere", hf_config=None,
            served_model_name="policy",
        )  # fmt: skip
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=cores)
        self.vllm_config = SimpleNamespace(
            model_config=model,
            parallel_config=parallel,
            lora_config=None,
            kv_transfer_config=None,
            weight_transfer_config=SimpleNamespace(backend="nccl"),
        )

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        calls = (self._call_utility_async(method, *args, engine=e) for e in self.core_engines)
        return (await asyncio.gather(*calls))[0]

    async def _call_utility_async(self, method: str, *args: Any, engine: int) -> Any:
        if method == "penstock_control":
            path, data = args
            step = path.removeprefix("/penstock/weights/")
            self.done.append(f"{step} {engine}")
            if step == "load":
                self.loading.set()
                await self.may_load.wait()
            loaded = {"checksum": "c", "seconds": {"pause": 0.1, "load": 0.2 + engine}, "preempted": 3, "kept": 1}
            loaded["version"] = orjson.loads(data).get("version")
            return self.replies.get(step, [200, loaded]) if engine else [200, loaded]
        if engine == 0:
            self.done.append(" ".join(map(str, (method, *args))))
        return {"penstock_control_port": 4001, "penstock_last_update": (3, "c")}.get(method)

    async def collective_rpc(self, method: str) -> list[Any]:
        self.done.append(method)
        return [None]

    async def is_paused(self) -> bool:
        return False

    async def update_weight_version(self, label: str) -> None:
        self.label = label

    async def get_weight_version(self) -> str:
        return self.label


ROUND = b'{"version": 4, "kv": "recompute"}'


async def info(cores: Cores, keys: list[str]) -> dict[str, Any]:
    start, body = await answer("GET", "/penstock/info", *keys, app=app_of(cores))
    assert start["status"] == 200
    return json.loads(body["body"])


@pytest.mark.parametrize(("keys", "cores", "port"), [(["secret"], 1, 4001), ([], 1, None), (["secret"], 2, None)])
async def test_one_core_has_a_port_where_there_is_a_key(
    keys: list[str], cores: int, port: int | None, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "".join(keys))
    engine = Cores(cores)
    assert (await info(engine, keys))["control_port"] == port
    assert ("penstock_control_port ['secret']" in engine.done) == (port is not None)


async def test_info_says_what_the_engine_is_and_warms_it_up_once(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv(INSTANCE_VARIABLE, "1f")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    cores, middleware = Cores(), PenstockMiddleware(behind)
    cores.label = "3"
    said = await middleware._routes._info.answer([], cores, b"")
    await middleware._routes._info.answer([], cores, b"")
    assert cores.done.count("penstock_warm_up") == 1
    assert (said["weight_version"], said["kv_kept"], said["checksum"]) == (3, True, "c")
    assert (said["lora"], said["dtype"], said["dp"], said["weight_transfer"]) == (False, "bfloat16", 2, "nccl")
    assert (said["model"], said["instance"]) == ("policy", "1f")
    cores.vllm_config.model_config.logprobs_mode, cores.label = "raw_logprobs", "4"
    said = await middleware._routes._info.answer([], cores, b"")
    assert (said["logprobs_mode"], said["kv_kept"]) == ("raw_logprobs", False)


@pytest.mark.parametrize("dev_mode", [None, "0"])
async def test_native_transfer_is_not_reported_without_its_routes(dev_mode: str | None, monkeypatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    if dev_mode is not None:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    assert (await info(Cores(), []))["weight_transfer"] is None


async def test_every_core_has_loaded_before_one_goes_on() -> None:
    cores = Cores()
    said = await PenstockMiddleware(behind)._routes.cores._apply(cores, ROUND)
    assert cores.done == ["load 0", "load 1", "commit 0", "commit 1"]
    assert (said["version"], said["preempted"], said["checksum"]) == (4, 6, "c-c")
    assert (said["seconds"]["pause"], said["seconds"]["load"]) == (0.1, 1.2)
    assert said["seconds"].keys() >= {"resume", "bubble"}


@pytest.mark.parametrize(
    ("route", "step", "reply"),
    [
        ("apply", "load", [409, {"error": "the trainer is gone", "torn": True}]),
        ("apply", "load", [500, {"error": "no memory"}]),
        ("prepare", "prepare", [400, {"error": "it does not fit"}]),
        ("group", "group", [400, {"error": "there is no such rank"}]),
    ],
)
async def test_a_core_that_fails_fails_for_all_and_none_goes_on(
    route: str, step: str, reply: list[Any], monkeypatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    cores = Cores()
    cores.replies[step] = reply
    start, body = await answer("POST", f"/penstock/weights/{route}", app=app_of(cores), body=ROUND)
    assert [start["status"], json.loads(body["body"])] == reply
    assert cores.done == [f"{step} 0", f"{step} 1"]


async def test_replicas_of_other_weights_do_not_go_on() -> None:
    cores = Cores()
    cores.replies["load"] = [200, {"checksum": "d", "seconds": {"load": 0.1}, "preempted": 0, "kept": 0}]
    with pytest.raises(WeightsError, match="replica 1 has on rank 0 weights of checksum d, replica 0 of c"):
        await PenstockMiddleware(behind)._routes.cores._apply(cores, ROUND)
    assert cores.done == ["load 0", "load 1"]


async def test_a_sleep_waits_for_a_round_that_loads() -> None:
    cores, middleware = Cores(), PenstockMiddleware(behind)
    cores.loading, cores.may_load = asyncio.Event(), asyncio.Event()
    middleware._routes.cores.install(cores)
    update = asyncio.create_task(middleware._routes.cores._apply(cores, ROUND))
    await cores.loading.wait()
    sleep = asyncio.create_task(cores.sleep_async(1, "keep"))
    for _ in range(10):
        await asyncio.sleep(0)
    cores.may_load.set()
    await asyncio.gather(update, sleep)
    assert cores.done[-3:] == ["commit 0", "commit 1", "penstock_sleep 1 keep"]


@pytest.mark.parametrize("older", [{}, {"wait_for_inflight_requests": True}])
async def test_a_pause_is_the_cores_and_leaves_the_cache_of_processed_images_alone(older: dict[str, bool]) -> None:
    cores = Cores()  # without vLLM's renderer, which has the sending half
    PenstockMiddleware(behind)._routes.cores.install(cores)
    await cores.pause_generation(mode="keep", clear_cache=True, **older)
    assert cores.done == [f"penstock_pause {'wait' if older else 'keep'} True"]
