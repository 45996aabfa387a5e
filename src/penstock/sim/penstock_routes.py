"""Penstock's own engine routes (ARCHITECTURE.md, Wires), and `POST /sim/fault`."""

from __future__ import annotations

from aiohttp import web

from penstock.errors import StateError, TransferError, WeightsError
from penstock.sim.answers import engine_of, json_answer, json_body
from penstock.sim.faults import Fault, Phase
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
