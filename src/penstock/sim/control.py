"""Control endpoints: vLLM's (pause, caches, memory, weights, adapters, health), Penstock's own and `POST /sim/fault`.

A server without Penstock's plugin (`SimConfig.plain`) has the endpoints that vLLM has with the same start options.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import CollectorRegistry

from penstock.control_types import KV, PauseMode
from penstock.errors import EngineDeadError, WeightsError
from penstock.sim.call import Call, error_answer
from penstock.sim.config import Fault, Phase, SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.update import NotFoundError
from penstock.weights.manifest import WeightManifest
from penstock.wire import ADAPTERS, INFO

Handler = Callable[[Call], Awaitable[Any]]
OK = {"ok": True}

# --- Penstock's own --------------------------------------------------------------------------------------------------


async def _info(call: Call) -> dict[str, Any]:
    call.engine.check_alive()
    config, weights = call.engine.config, call.engine.weights
    return {
        "engine": "sim",
        "vllm": config.vllm_version,
        "instance": call.engine.instance,
        "model": config.served_model_name,
        "weight_version": weights.version,
        "kv_kept": weights.version == weights.kv_kept,
        "checksum": weights.checksum,
        "kv_in_flight": True,
        "paused": call.engine.paused,
        "tp": 1,
        "pp": 1,
        "dp": config.data_parallel_size,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_model_len,
        "transports": ["broadcast", "delta", "disk", "shared_memory"],
        "logprobs_mode": config.logprobs_mode,
        "weight_transfer": config.weight_transfer_backend or None,
    }


async def _group(call: Call) -> dict[str, Any]:
    call.engine.check_alive()
    if call.engine.config.data_parallel_size > 1:
        raise WeightsError("a simulated engine of several data-parallel ranks takes no broadcast")
    await asyncio.to_thread(call.engine.weights.group.join, call.body, 0)  # the call may import torch
    return OK


async def _prepare(call: Call) -> dict[str, Any]:
    await call.engine.prepare(WeightManifest.from_json(call.body.get("manifest", {})))
    return OK


async def _apply(call: Call) -> dict[str, Any]:
    """Apply a version. After any answer but 200 the engine must not serve again."""
    version, kv = call.body.get("version"), call.body.get("kv", "recompute")
    if type(version) is not int:
        raise WeightsError(f"version must be an integer, got {version!r}")
    if kv not in get_args(KV):
        raise WeightsError(f"kv must be one of {', '.join(get_args(KV))}, got {kv!r}")
    return await call.engine.apply(version, kv=kv)


async def _loss(call: Call) -> dict[str, Any] | None:
    version, timeout_s = int(call.body["version"]), float(call.body["timeout_s"])
    cost = await call.engine.token_loss(version, call.body.get("adapter"), timeout_s)
    return None if cost is None else asdict(cost)


async def _adapters(call: Call) -> dict[str, Any]:
    call.engine.check_alive()
    return call.engine.adapters_served()


async def _read_adapter(call: Call) -> dict[str, Any]:
    await call.engine.read_adapter(call.body["source"])
    return OK


async def _load_adapter(call: Call) -> dict[str, Any]:
    name, body = str(call.body.get("name") or ""), call.body
    return await call.engine.load_adapter(name, int(body["version"]), body["source"], body["kv"])


def _change_adapter(change: Literal["unload", "pause", "resume"]) -> Handler:
    async def handle(call: Call) -> dict[str, Any]:
        await call.engine.change_adapter(str(call.body.get("name") or ""), change)
        return OK

    return handle


async def _set_fault(call: Call) -> dict[str, Any]:
    """Set a fault, given as for `Fault.of`, or clear all with `{"clear": true}`."""
    if call.body.get("clear"):
        call.engine.faults.clear()
    else:
        call.engine.faults.add(Fault.of(call.body))
        await call.engine.at(Phase.NOW)
    return OK


# --- vLLM's own: `/server_info` and the presence of endpoints show how vLLM was started ------------------------------


async def _server_info(call: Call) -> dict[str, Any]:
    """Return the settings that our client reads."""
    config = call.engine.config
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
        "instance_id": call.engine.instance,
    }
    return {"vllm_config": settings}


async def no_tokens(_: Call) -> web.Response:
    """Refuse a call of the token endpoint, as vLLM does without `--enable-scale-out`."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return error_answer(message, "PermissionDeniedError", 403)


async def _health(call: Call) -> web.Response:
    try:
        await call.engine.at(Phase.HEALTH)
    except EngineDeadError:
        return web.Response(status=503)
    return web.Response()


async def _metrics(call: Call) -> web.Response:
    return web.Response(text=metrics_text(call.ranks), content_type="text/plain")


async def _version(call: Call) -> dict[str, Any]:
    return {"version": call.engine.config.vllm_version}


def _mode(call: Call) -> PauseMode:
    return PauseMode(call.http.query.get("mode", PauseMode.ABORT))


async def _pause(call: Call) -> dict[str, Any]:
    clear_cache, release = call.flag("clear_cache", default=True), call.flag("release", default=False)
    await call.engine.pause(_mode(call), clear_cache=clear_cache, release=release)
    return {"status": "paused"}


async def _resume(call: Call) -> dict[str, Any]:
    await call.engine.resume()
    return {"status": "resumed"}


async def _is_paused(call: Call) -> dict[str, Any]:
    await call.engine.at(Phase.CONTROL)
    return {"is_paused": call.engine.paused}


async def _abort_requests(call: Call) -> dict[str, Any]:
    call.engine.check_alive()
    ids = call.field("request_ids", list) if call.body.get("request_ids") else None
    return {"status": "aborted", "aborted": call.engine.abort(map(str, ids) if ids else None, asked=True)}


async def _reset_prefix_cache(call: Call) -> dict[str, Any]:
    running = call.flag("reset_running_requests", default=False)
    return {"success": call.engine.reset_prefix_cache(reset_running_requests=running)}


async def _sleep(call: Call) -> dict[str, Any]:
    level = int(call.http.query.get("level", "1"))
    await call.engine.sleep(level, _mode(call))
    return {"status": "sleeping", "level": level}


async def _wake_up(call: Call) -> dict[str, Any]:
    tags = call.http.query.getall("tags", []) or None
    awake = await call.engine.wake_up(tags)
    return {"status": "awake" if awake else "sleeping", "tags": tags}


async def _collective_rpc(call: Call) -> dict[str, Any]:
    """Return the call itself as the result of the one simulated worker."""
    call.engine.check_alive()
    method, args, kwargs = call.field("method", str), call.body.get("args", []), call.body.get("kwargs", {})
    return {"results": [{"method": method, "args": args, "kwargs": kwargs}]}


async def _init_weight_transfer_engine(call: Call) -> dict[str, Any]:
    call.field("init_info", dict)
    call.engine.check_alive()
    call.engine.weights.initialised = True
    return {"message": "Weight transfer initialized"}


async def _start_weight_update(call: Call) -> dict[str, Any]:
    call.engine.start_update()
    return {"message": "Weight update started"}


async def _update_weights(call: Call) -> dict[str, Any]:
    call.field("update_info", dict)
    await call.engine.update_weights()
    return {"message": "Weights updated"}


async def _finish_weight_update(call: Call) -> dict[str, Any]:
    labelled = call.body.get("weight_version") is not None
    await call.engine.finish_update(call.field("weight_version", str) if labelled else None)
    return {"message": "Weight update finished"}


async def _update_weight_version(call: Call) -> dict[str, Any]:
    label = call.field("new_version", str)
    call.engine.check_alive()
    call.engine.weights.label = label
    return {"success": True, "new_version": label}


async def _weight_info(call: Call) -> dict[str, Any]:
    call.engine.check_alive()
    return {"weight_version": call.engine.weights.label}


async def _load_lora_adapter(call: Call) -> web.Response:
    body = call.body
    name, path = str(body.get("lora_name") or ""), str(body.get("lora_path") or "")
    call.engine.check_alive()
    call.engine.adapters.load(name, path)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def _unload_lora_adapter(call: Call) -> web.Response:
    name = call.field("lora_name", str)
    if name not in call.engine.adapters.loaded:
        raise NotFoundError(f"The lora adapter '{name}' cannot be found.")
    call.engine.adapters.forget(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


# --- Which endpoints a server has -----------------------------------------------------------------------------------

_ALWAYS: Mapping[str, Handler] = {
    "GET /health": _health,
    "GET /metrics": _metrics,
    "GET /version": _version,
    "POST /v1/load_lora_adapter": _load_lora_adapter,
    "POST /v1/unload_lora_adapter": _unload_lora_adapter,
    "POST /sim/fault": _set_fault,
}
_DEV_MODE: Mapping[str, Handler] = {
    "GET /is_paused": _is_paused,
    "POST /pause": _pause,
    "POST /resume": _resume,
    "POST /reset_prefix_cache": _reset_prefix_cache,
    "POST /sleep": _sleep,
    "POST /wake_up": _wake_up,
    "POST /collective_rpc": _collective_rpc,
    "POST /init_weight_transfer_engine": _init_weight_transfer_engine,
    "POST /start_weight_update": _start_weight_update,
    "POST /update_weights": _update_weights,
    "POST /finish_weight_update": _finish_weight_update,
}
_SINCE_0_32: Mapping[str, Handler] = {
    "GET /weight_info": _weight_info,
    "POST /update_weight_version": _update_weight_version,
    "POST /abort_requests": _abort_requests,
}
_PLAIN_DEV_MODE: Mapping[str, Handler] = {"GET /server_info": _server_info}
_PLUGIN: Mapping[str, Handler] = {
    f"GET {INFO}": _info,
    "POST /penstock/weights/group": _group,
    "POST /penstock/weights/prepare": _prepare,
    "POST /penstock/weights/apply": _apply,
    "POST /penstock/weights/loss": _loss,
    f"GET {ADAPTERS}": _adapters,
    f"POST {ADAPTERS}/read": _read_adapter,
    f"POST {ADAPTERS}/load": _load_adapter,
    f"POST {ADAPTERS}/unload": _change_adapter("unload"),
    f"POST {ADAPTERS}/pause": _change_adapter("pause"),
    f"POST {ADAPTERS}/resume": _change_adapter("resume"),
}


def routes(config: SimConfig) -> dict[str, Handler]:
    """Return handlers by method and path. As in vLLM, most need dev mode."""
    found = dict(_ALWAYS)
    if config.dev_mode or not config.plain:
        found.update(_DEV_MODE)
        found.update(_SINCE_0_32 if config.keeps_versions else {})
        found.update(_PLAIN_DEV_MODE if config.plain else _PLUGIN)
    return found


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics_text(ranks: Sequence[SimEngine]) -> str:
    """Return `GET /metrics`: vLLM's series with true values, per data-parallel rank."""
    registry = CollectorRegistry()
    registry.register(_Ranks(ranks))
    return generate_latest(registry).decode()


class _Ranks:
    """A prometheus_client collector over the ranks of an engine."""

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
