"""vLLM's control endpoints: pause and resume, caches, memory, weights, adapters, health."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.errors import EngineDeadError, UserError
from penstock.sim.adapters import AdapterNotFoundError
from penstock.sim.answers import RANKS, InvalidFieldError, engine_of, error_answer, json_answer, json_body
from penstock.sim.faults import Phase
from penstock.sim.figures import prometheus
from penstock.types import PauseMode

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
    return web.Response(text=prometheus(http.app[RANKS]), content_type="text/plain")


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
