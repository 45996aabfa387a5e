"""Control endpoints: vLLM's (pause, caches, memory, weights, adapters, health), Penstock's own and `POST /sim/fault`.

A server without Penstock's plugin has those that plain vLLM has, as its owner started it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.errors import EngineDeadError, StateError, TransferError, UserError, WeightsError
from penstock.sim.adapters import AdapterNotFoundError
from penstock.sim.config import SimConfig
from penstock.sim.faults import Fault, Phase
from penstock.sim.http import RANKS, InvalidFieldError, engine_of, error_answer, json_answer, json_body
from penstock.sim.stats import RankMetrics
from penstock.types import PauseMode
from penstock.weights.manifest import WeightManifest


async def info(http: web.Request) -> web.Response:
    """`GET /penstock/info`."""
    engine = engine_of(http)
    engine.check_alive()
    config = engine.config
    sizes = {"tp": 1, "pp": 1, "dp": config.data_parallel_size}
    limits = {"vocab_size": config.vocab_size, "max_model_len": config.max_model_len}
    version = engine.weights.version
    state = {"weight_version": version, "kv_kept": version == engine.weights.kv_kept, "paused": engine.paused}
    set_as = {
        "transports": ["broadcast", "delta", "disk", "shared_memory"],
        "logprobs_mode": config.logprobs_mode,
    }
    return json_answer({"engine": "sim", "vllm": config.vllm_version, **state, **sizes, **limits, **set_as})


async def group(http: web.Request) -> web.Response:
    """`POST /penstock/weights/group`: the engine begins to join; 400 where it cannot."""
    engine = engine_of(http)
    engine.check_alive()
    if engine.config.data_parallel_size > 1:
        return json_answer({"error": "a simulated engine of several data-parallel ranks takes no broadcast"}, 400)
    body = await json_body(http)
    try:
        engine.weights.group.join(body)
    except WeightsError as error:
        return json_answer({"error": str(error)}, 400)
    return json_answer({"ok": True})


async def prepare(http: web.Request) -> web.Response:
    """`POST /penstock/weights/prepare`: 400 and nothing changed where the offer does not fit."""
    body = await json_body(http)
    try:
        await engine_of(http).weights.prepare(WeightManifest.from_json(body.get("manifest", {})))
    except WeightsError as error:
        return json_answer({"error": str(error)}, 400)
    return json_answer({"ok": True})


async def apply(http: web.Request) -> web.Response:
    """`POST /penstock/weights/apply`: any answer but 200 means that the engine must not serve again."""
    body = await json_body(http)
    version = body.get("version")
    if type(version) is not int:
        return json_answer({"error": f"version must be an integer, got {version!r}"}, 400)
    try:
        done = await engine_of(http).weights.apply(version, clear_cache=bool(body.get("clear_cache", True)))
    except StateError as error:
        return json_answer({"error": str(error)}, 409)
    except TransferError as error:
        return json_answer({"error": str(error), "torn": True}, 409)
    return json_answer(done)


async def set_fault(http: web.Request) -> web.Response:
    """`POST /sim/fault`: one fault, as `Fault.of` reads it, or `{"clear": true}`."""
    engine = engine_of(http)
    body = await json_body(http)
    if body.get("clear"):
        engine.faults.clear()
    else:
        engine.faults.add(Fault.of(body))
        await engine.at(Phase.NOW)
    return json_answer({"ok": True})


ALWAYS = frozenset({"/health", "/ping", "/metrics", "/version"})
WITH_LORA = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
SINCE_0_32 = frozenset({"/weight_info", "/update_weight_version", "/abort_requests"})


def has(config: SimConfig, path: str) -> bool:
    """Whether there is this endpoint: vLLM registers those for training in dev mode only."""
    if not config.plain or path in ALWAYS | WITH_LORA:
        return True
    return config.dev_mode and (config.keeps_versions or path not in SINCE_0_32)


async def server_info(http: web.Request) -> web.Response:
    """`GET /server_info?config_format=json`, as far as anyone here reads it."""
    config = http.app[RANKS][0].config
    backend = config.weight_transfer_backend
    settings = {
        "model_config": {
            "max_model_len": config.max_model_len,
            "enable_sleep_mode": config.enable_sleep_mode,
            "logprobs_mode": config.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": config.data_parallel_size,
            "data_parallel_size_local": config.data_parallel_size,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
        },
        "weight_transfer_config": {"backend": backend} if backend else None,
        "instance_id": str(id(http.app[RANKS])),
    }
    return json_answer({"vllm_config": settings})


async def no_tokens(_: web.Request) -> web.Response:
    """The token endpoint without `--enable-scale-out`."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return error_answer(message, "PermissionDeniedError", 403)


E = TypeVar("E", bound=StrEnum)


async def health(http: web.Request) -> web.Response:
    """`GET /health`: 503 when the engine core is dead."""
    engine = engine_of(http)
    try:
        await engine.at(Phase.HEALTH)
    except EngineDeadError:
        return web.Response(status=503)
    return web.Response()


async def metrics(http: web.Request) -> web.Response:
    """`GET /metrics`, Prometheus text."""
    ranks = http.app[RANKS]
    metrics = RankMetrics(ranks[0].config, [(rank.scheduler, rank.stats) for rank in ranks])
    return web.Response(text=metrics.text(), content_type="text/plain")


async def version(http: web.Request) -> web.Response:
    """`GET /version`."""
    return json_answer({"version": engine_of(http).config.vllm_version})


async def pause(http: web.Request) -> web.Response:
    """`POST /pause?mode=&clear_cache=&release=`."""
    mode, clear_cache = _choice(http, "mode", PauseMode.ABORT), _flag(http, "clear_cache", default=True)
    release = _flag(http, "release", default=False)
    await engine_of(http).holds.pause(mode, clear_cache=clear_cache, release=release)
    return json_answer({"status": "paused"})


async def resume(http: web.Request) -> web.Response:
    """`POST /resume`."""
    await engine_of(http).holds.resume()
    return json_answer({"status": "resumed"})


async def is_paused(http: web.Request) -> web.Response:
    """`GET /is_paused`."""
    engine = engine_of(http)
    await engine.at(Phase.CONTROL)
    return json_answer({"is_paused": engine.paused})


async def abort_requests(http: web.Request) -> web.Response:
    """`POST /abort_requests`: those named, or all."""
    engine = engine_of(http)
    engine.check_alive()
    names = (await json_body(http)).get("request_ids")
    return json_answer({"status": "aborted", "aborted": engine.abort(names or None, asked=True)})


async def reset_prefix_cache(http: web.Request) -> web.Response:
    """`POST /reset_prefix_cache?reset_running_requests=`."""
    running = _flag(http, "reset_running_requests", default=False)
    return json_answer({"success": engine_of(http).reset_prefix_cache(reset_running_requests=running)})


async def sleep(http: web.Request) -> web.Response:
    """`POST /sleep?level=&mode=`."""
    text = http.query.get("level", "1")
    if text not in ("0", "1", "2"):
        raise InvalidFieldError("query.level", f"must be 0, 1 or 2, got {text!r}")
    level = int(text)
    await engine_of(http).holds.sleep(level, _choice(http, "mode", PauseMode.ABORT))
    return json_answer({"status": "sleeping", "level": level})


async def wake_up(http: web.Request) -> web.Response:
    """`POST /wake_up?tags=`."""
    tags = http.query.getall("tags", []) or None
    awake = await engine_of(http).holds.wake_up(tags)
    return json_answer({"status": "awake" if awake else "sleeping", "tags": tags})


async def is_sleeping(http: web.Request) -> web.Response:
    """`GET /is_sleeping`: a paused engine counts as sleeping, as in vLLM."""
    engine = engine_of(http)
    return json_answer({"is_sleeping": engine.paused or bool(engine.asleep)})


async def collective_rpc(http: web.Request) -> web.Response:
    """`POST /collective_rpc`: the simulated engine has one worker, which gives back what it was called with."""
    body = await json_body(http)
    engine_of(http).check_alive()
    method = body.get("method")
    if method is None:
        return error_answer("Missing 'method' in request body", "Bad Request", 400)
    call: dict[str, Any] = {"method": method, "args": body.get("args", []), "kwargs": body.get("kwargs", {})}
    return json_answer({"results": [call]})


async def init_weight_transfer_engine(http: web.Request) -> web.Response:
    """`POST /init_weight_transfer_engine` with `init_info`."""
    _object(await json_body(http), "init_info")
    engine_of(http).weights.init_transfer()
    return json_answer({"message": "Weight transfer initialized"})


async def start_weight_update(http: web.Request) -> web.Response:
    """`POST /start_weight_update`."""
    engine_of(http).weights.start()
    return json_answer({"message": "Weight update started"})


async def update_weights(http: web.Request) -> web.Response:
    """`POST /update_weights` with `update_info`."""
    _object(await json_body(http), "update_info")
    await engine_of(http).weights.update()
    return json_answer({"message": "Weights updated"})


async def finish_weight_update(http: web.Request) -> web.Response:
    """`POST /finish_weight_update`, with `weight_version` or not."""
    label = (await json_body(http, optional=True)).get("weight_version")
    if label is not None and not isinstance(label, str):
        raise InvalidFieldError("weight_version", f"Input should be a valid string, got {label!r}")
    engine = engine_of(http)
    engine.weights.finish(label)
    await engine.holds.weights_are_in()
    return json_answer({"message": "Weight update finished"})


async def update_weight_version(http: web.Request) -> web.Response:
    """`POST /update_weight_version` with `new_version`."""
    label = (await json_body(http)).get("new_version")
    if not isinstance(label, str):
        raise InvalidFieldError("new_version", f"Input should be a valid string, got {label!r}")
    engine_of(http).weights.relabel(label)
    return json_answer({"success": True, "new_version": label})


async def weight_info(http: web.Request) -> web.Response:
    """`GET /weight_info`."""
    engine = engine_of(http)
    engine.check_alive()
    return json_answer({"weight_version": engine.weights.label})


async def load_lora_adapter(http: web.Request) -> web.Response:
    """`POST /v1/load_lora_adapter`."""
    body = await json_body(http)
    name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
    engine_of(http).check_alive()
    try:
        engine_of(http).adapters.load(name, path, in_place=bool(body.get("load_inplace")))
    except UserError as error:
        return error_answer(str(error), "InvalidUserInput", 400)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(http: web.Request) -> web.Response:
    """`POST /v1/unload_lora_adapter`."""
    name = str((await json_body(http)).get("lora_name") or "")
    try:
        engine_of(http).adapters.unload(name)
    except AdapterNotFoundError:
        raise
    except UserError as error:
        return error_answer(str(error), "InvalidUserInput", 400)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


GET: Mapping[str, Handler] = {
    "/health": health,
    "/ping": health,
    "/metrics": metrics,
    "/version": version,
    "/is_paused": is_paused,
    "/is_sleeping": is_sleeping,
    "/weight_info": weight_info,
}
POST: Mapping[str, Handler] = {
    "/ping": health,
    "/pause": pause,
    "/resume": resume,
    "/abort_requests": abort_requests,
    "/reset_prefix_cache": reset_prefix_cache,
    "/sleep": sleep,
    "/wake_up": wake_up,
    "/collective_rpc": collective_rpc,
    "/init_weight_transfer_engine": init_weight_transfer_engine,
    "/start_weight_update": start_weight_update,
    "/update_weights": update_weights,
    "/finish_weight_update": finish_weight_update,
    "/update_weight_version": update_weight_version,
    "/v1/load_lora_adapter": load_lora_adapter,
    "/v1/unload_lora_adapter": unload_lora_adapter,
}


def _choice(http: web.Request, name: str, default: E) -> E:
    text = http.query.get(name)
    if text is None:
        return default
    try:
        return type(default)(text)
    except ValueError:
        known = ", ".join(type(default))
        raise InvalidFieldError(f"query.{name}", f"must be one of {known}, got {text!r}") from None


def _flag(http: web.Request, name: str, *, default: bool) -> bool:
    text = http.query.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidFieldError(f"query.{name}", f"Input should be a valid boolean, got {text!r}")
    return text.lower() in ("true", "1")


def _object(body: dict[str, Any], name: str) -> None:
    if not isinstance(body.get(name), dict):
        raise InvalidFieldError(name, "Field required, an object")
