"""Control endpoints: vLLM's (pause, caches, memory, weights, adapters, health), Penstock's own and `POST /sim/fault`.

A server without Penstock's plugin (`SimConfig.plain`) has those that vLLM has when it is started that way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any, TypeVar, get_args

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.errors import EngineDeadError, StateError, TransferError, UserError, WeightsError
from penstock.sim.adapters import NotFoundError
from penstock.sim.config import SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.faults import Fault, Phase
from penstock.sim.http import RANKS, InvalidFieldError, engine_of, error_answer, json_answer, json_body
from penstock.types import KV, PauseMode
from penstock.weights.manifest import WeightManifest

E = TypeVar("E", bound=StrEnum)

# --- Penstock's own --------------------------------------------------------------------------------------------------


async def info(http: web.Request) -> web.Response:
    """`GET /penstock/info`."""
    engine = engine_of(http)
    engine.check_alive()
    config, weights = engine.config, engine.weights
    return json_answer(
        {
            "engine": "sim",
            "vllm": config.vllm_version,
            "weight_version": weights.version,
            "kv_kept": weights.version == weights.kv_kept,
            "kv_in_flight": True,
            "paused": engine.paused,
            "tp": 1,
            "pp": 1,
            "dp": config.data_parallel_size,
            "vocab_size": config.vocab_size,
            "max_model_len": config.max_model_len,
            "transports": ["broadcast", "delta", "disk", "shared_memory"],
            "logprobs_mode": config.logprobs_mode,
        }
    )


async def group(http: web.Request) -> web.Response:
    """`POST /penstock/weights/group`: the engine begins to join; 400 if it cannot."""
    engine = engine_of(http)
    engine.check_alive()
    if engine.config.data_parallel_size > 1:
        return json_answer({"error": "a simulated engine of several data-parallel ranks takes no broadcast"}, 400)
    body = await json_body(http)
    try:
        await asyncio.to_thread(engine.weights.group.join, body, 0)  # it may have to import torch
    except WeightsError as error:
        return json_answer({"error": str(error)}, 400)
    return json_answer({"ok": True})


async def prepare(http: web.Request) -> web.Response:
    """`POST /penstock/weights/prepare`: 400 and nothing changed if the offer does not fit."""
    body = await json_body(http)
    try:
        await engine_of(http).prepare(WeightManifest.from_json(body.get("manifest", {})))
    except WeightsError as error:
        return json_answer({"error": str(error)}, 400)
    return json_answer({"ok": True})


async def apply(http: web.Request) -> web.Response:
    """`POST /penstock/weights/apply`: after any answer but 200 the engine must not serve again."""
    body = await json_body(http)
    version = body.get("version")
    if type(version) is not int:
        return json_answer({"error": f"version must be an integer, got {version!r}"}, 400)
    if (kv := body.get("kv", "recompute")) not in get_args(KV):
        return json_answer({"error": f"kv must be one of {', '.join(get_args(KV))}, got {kv!r}"}, 400)
    try:
        done = await engine_of(http).apply(version, kv=kv)
    except StateError as error:
        return json_answer({"error": str(error)}, 409)
    except TransferError as error:
        return json_answer({"error": str(error), "torn": True}, 409)
    return json_answer(done)


async def loss(http: web.Request) -> web.Response:
    """`POST /penstock/weights/loss`: what an update cost, once it is known."""
    body = await json_body(http)
    cost = await engine_of(http).token_loss(int(body["version"]), float(body["timeout_s"]))
    return json_answer(None if cost is None else asdict(cost))


async def adapters(http: web.Request) -> web.Response:
    """`GET /penstock/adapters`."""
    engine_of(http).check_alive()
    return json_answer(engine_of(http).adapters_served())


async def change_adapter(http: web.Request) -> web.Response:
    """`POST /penstock/adapters/CALL`: 400 and nothing changed if it does not fit, 409 if it is in use."""
    engine, body = engine_of(http), await json_body(http)
    name, call = str(body.get("name") or ""), http.match_info["call"]
    try:
        if call == "load":
            given = int(body["version"]), body["source"], body["kv"]
            return json_answer(await engine.load_adapter(name, *given))
        changes = {"unload": engine.unload_adapter, "pause": engine.pause_adapter, "resume": engine.resume_adapter}
        await changes[call](name)
    except StateError as error:
        return json_answer({"error": str(error)}, 409)
    except (KeyError, TypeError, UserError) as error:
        return json_answer({"error": str(error)}, 400)
    return json_answer({"ok": True})


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


# --- vLLM's, as `/server_info` and the endpoints' presence tell how it was started ------------------------------------

ALWAYS = frozenset(
    {"/health", "/metrics", "/version", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"},
)
SINCE_0_32 = frozenset({"/weight_info", "/update_weight_version", "/abort_requests"})


def has(config: SimConfig, path: str) -> bool:
    """Whether this endpoint exists: vLLM registers those for training in dev mode only."""
    if not config.plain or path in ALWAYS:
        return True
    return config.dev_mode and (config.keeps_versions or path not in SINCE_0_32)


async def server_info(http: web.Request) -> web.Response:
    """`GET /server_info?config_format=json`, as far as a client here reads it."""
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


async def _health(http: web.Request) -> web.Response:
    try:
        await engine_of(http).at(Phase.HEALTH)
    except EngineDeadError:
        return web.Response(status=503)
    return web.Response()


async def _metrics(http: web.Request) -> web.Response:
    return web.Response(text=metrics_text(http.app[RANKS]), content_type="text/plain")


async def _version(http: web.Request) -> web.Response:
    return json_answer({"version": engine_of(http).config.vllm_version})


async def _pause(http: web.Request) -> web.Response:
    mode, clear_cache = _choice(http, "mode", PauseMode.ABORT), _flag(http, "clear_cache", default=True)
    await engine_of(http).pause(mode, clear_cache=clear_cache, release=_flag(http, "release", default=False))
    return json_answer({"status": "paused"})


async def _resume(http: web.Request) -> web.Response:
    await engine_of(http).resume()
    return json_answer({"status": "resumed"})


async def _is_paused(http: web.Request) -> web.Response:
    engine = engine_of(http)
    await engine.at(Phase.CONTROL)
    return json_answer({"is_paused": engine.paused})


async def _abort_requests(http: web.Request) -> web.Response:
    engine = engine_of(http)
    engine.check_alive()
    names = (await json_body(http)).get("request_ids")
    return json_answer({"status": "aborted", "aborted": engine.abort(names or None, asked=True)})


async def _reset_prefix_cache(http: web.Request) -> web.Response:
    running = _flag(http, "reset_running_requests", default=False)
    return json_answer({"success": engine_of(http).reset_prefix_cache(reset_running_requests=running)})


async def _sleep(http: web.Request) -> web.Response:
    text = http.query.get("level", "1")
    if text not in ("0", "1", "2"):
        raise InvalidFieldError("query.level", f"must be 0, 1 or 2, got {text!r}")
    await engine_of(http).sleep(int(text), _choice(http, "mode", PauseMode.ABORT))
    return json_answer({"status": "sleeping", "level": int(text)})


async def _wake_up(http: web.Request) -> web.Response:
    tags = http.query.getall("tags", []) or None
    awake = await engine_of(http).wake_up(tags)
    return json_answer({"status": "awake" if awake else "sleeping", "tags": tags})


async def _collective_rpc(http: web.Request) -> web.Response:
    """The simulated engine has one worker, which returns what it was called with."""
    body = await json_body(http)
    engine_of(http).check_alive()
    method = body.get("method")
    if method is None:
        return error_answer("Missing 'method' in request body", "Bad Request", 400)
    call: dict[str, Any] = {"method": method, "args": body.get("args", []), "kwargs": body.get("kwargs", {})}
    return json_answer({"results": [call]})


async def _init_weight_transfer_engine(http: web.Request) -> web.Response:
    _object(await json_body(http), "init_info")
    engine = engine_of(http)
    engine.check_alive()
    engine.weights.initialised = True
    return json_answer({"message": "Weight transfer initialized"})


async def _start_weight_update(http: web.Request) -> web.Response:
    engine_of(http).start_update()
    return json_answer({"message": "Weight update started"})


async def _update_weights(http: web.Request) -> web.Response:
    _object(await json_body(http), "update_info")
    await engine_of(http).update_weights()
    return json_answer({"message": "Weights updated"})


async def _finish_weight_update(http: web.Request) -> web.Response:
    label = (await json_body(http, optional=True)).get("weight_version")
    if label is not None and not isinstance(label, str):
        raise InvalidFieldError("weight_version", f"Input should be a valid string, got {label!r}")
    await engine_of(http).finish_update(label)
    return json_answer({"message": "Weight update finished"})


async def _update_weight_version(http: web.Request) -> web.Response:
    label = (await json_body(http)).get("new_version")
    if not isinstance(label, str):
        raise InvalidFieldError("new_version", f"Input should be a valid string, got {label!r}")
    engine = engine_of(http)
    engine.check_alive()
    engine.weights.label = label
    return json_answer({"success": True, "new_version": label})


async def _weight_info(http: web.Request) -> web.Response:
    engine = engine_of(http)
    engine.check_alive()
    return json_answer({"weight_version": engine.weights.label})


async def _load_lora_adapter(http: web.Request) -> web.Response:
    body = await json_body(http)
    name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
    engine_of(http).check_alive()
    try:
        engine_of(http).adapters.load(name, path, in_place=bool(body.get("load_inplace")))
    except UserError as error:
        return error_answer(str(error), "InvalidUserInput", 400)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def _unload_lora_adapter(http: web.Request) -> web.Response:
    name = str((await json_body(http)).get("lora_name") or "")
    try:
        engine_of(http).adapters.unload(name)
    except NotFoundError:
        raise
    except UserError as error:
        return error_answer(str(error), "InvalidUserInput", 400)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


GET: Mapping[str, Handler] = {
    "/health": _health,
    "/metrics": _metrics,
    "/version": _version,
    "/is_paused": _is_paused,
    "/weight_info": _weight_info,
}
POST: Mapping[str, Handler] = {
    "/pause": _pause,
    "/resume": _resume,
    "/abort_requests": _abort_requests,
    "/reset_prefix_cache": _reset_prefix_cache,
    "/sleep": _sleep,
    "/wake_up": _wake_up,
    "/collective_rpc": _collective_rpc,
    "/init_weight_transfer_engine": _init_weight_transfer_engine,
    "/start_weight_update": _start_weight_update,
    "/update_weights": _update_weights,
    "/finish_weight_update": _finish_weight_update,
    "/update_weight_version": _update_weight_version,
    "/v1/load_lora_adapter": _load_lora_adapter,
    "/v1/unload_lora_adapter": _unload_lora_adapter,
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


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics_text(ranks: Sequence[SimEngine]) -> str:
    """`GET /metrics`: vLLM's series with true values, a sample for each data-parallel rank."""
    registry = CollectorRegistry()
    registry.register(_Ranks(ranks))
    return generate_latest(registry).decode()


class _Ranks:
    """A prometheus_client collector."""

    def __init__(self, ranks: Sequence[SimEngine]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterable[Metric]:
        config = self._ranks[0].config
        model = config.served_model_name
        cache = GaugeMetricFamily("vllm:cache_config_info", "", labels=["block_size", "num_gpu_blocks", "engine"])
        success = CounterMetricFamily("vllm:request_success", "", labels=["engine", "model_name", "finished_reason"])
        series: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for number, rank in enumerate(map(str, range(len(self._ranks)))):
            engine = self._ranks[number]
            cache.add_metric([str(config.block_size), str(config.kv_blocks), rank], 1)
            for reason in ("stop", "length", "abort"):
                success.add_metric([rank, model, reason], engine.stats.finished[reason])
            for name, value in _values(engine).items():
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = series.setdefault(name, kind(f"vllm:{name}", "", labels=["engine", "model_name"]))
                family.add_metric([rank, model], value)
        return [cache, *series.values(), success]


def _values(engine: SimEngine) -> dict[str, float]:
    scheduler, stats = engine.scheduler, engine.stats
    return {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": scheduler.pool.usage,
        "prefix_cache_queries_total": stats.queries,
        "prefix_cache_hits_total": stats.hits,
        "num_preemptions_total": stats.preemptions,
        "prompt_tokens_total": stats.prompt_tokens,
        "generation_tokens_total": stats.generation_tokens,
    }
