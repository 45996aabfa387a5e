"""LoRA adapters in the API server: our routes for them, and vLLM's table of the adapters that requests can name."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import ExitStack
from typing import Any

import orjson

from penstock.checks import parse_json
from penstock.errors import StateError, WeightsError
from penstock.plugin.adapter_worker import PLACE
from penstock.plugin.core import field
from penstock.plugin.cores import on_cores
from penstock.plugin.hooks import RequestHooks
from penstock.wire import ADAPTERS


class ServedAdapters:
    """The adapters of one API server: their names in vLLM's table, and the calls to all cores."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self._changing = asyncio.Lock()

    def routes(self, state: Any) -> dict[tuple[str, str], Any]:
        """Return calls by method and path. Each takes vLLM's AsyncLLM and the body."""
        return {
            ("GET", ADAPTERS): functools.partial(self.served, state),
            ("POST", ADAPTERS + "/read"): functools.partial(self.forward, "read"),
            ("POST", ADAPTERS + "/load"): functools.partial(self.load, state),
            ("POST", ADAPTERS + "/unload"): functools.partial(self.unload, state),
            ("POST", ADAPTERS + "/pause"): functools.partial(self.forward, "pause"),
            ("POST", ADAPTERS + "/resume"): functools.partial(self.forward, "resume"),
        }

    async def served(self, state: Any, engine: Any, _data: bytes) -> dict[str, Any]:
        """Return each adapter's version, requests in flight, and idle seconds."""
        known, now = state.openai_serving_models.lora_requests, time.monotonic()
        in_flight = [state.lora_name for state in engine.output_processor.request_states.values()]
        return {
            name: {
                "version": self._hooks.versions.adapters.get((0, name), {}).get("adapter_version"),
                "in_flight": in_flight.count(name),
                "idle_s": now - self._hooks.adapters_used.setdefault(name, now),
            }
            for name in known
        }

    async def load(self, state: Any, engine: Any, data: bytes) -> dict[str, Any]:
        """Put a version of an adapter in force on every core. Then let requests name it."""
        body = parse_json(data, "the body", WeightsError)
        name = field(body, "name", str)
        models = state.openai_serving_models
        if engine.vllm_config.lora_config is None:
            raise WeightsError("the engine takes no adapters; launch it with enable_lora=true")
        if models.is_base_model(name):
            raise WeightsError(f"{name!r} is the name of the base model; give the adapter another")
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and only needed with adapters

        self._hooks.install(engine)
        async with self._changing:
            known = models.lora_requests.get(name)
            number = models.lora_id_counter.inc(1) if known is None else known.lora_int_id
            order = orjson.dumps({**body, "id": number})
            answers = await on_cores(engine, f"{ADAPTERS}/load", order)
            models.lora_requests[name] = LoRARequest(name, number, PLACE + name)
            self._hooks.adapters_used[name] = time.monotonic()
        slowest = max(answers, key=lambda answer: answer["seconds"]["bubble"])
        return {**slowest, **{name: sum(answer[name] for answer in answers) for name in ("preempted", "kept")}}

    async def unload(self, state: Any, engine: Any, data: bytes) -> dict[str, Any]:
        """Forget an adapter, if there is one. StateError: it has requests in flight."""
        name = field(parse_json(data, "the body", WeightsError), "name", str)
        models = state.openai_serving_models
        async with self._changing:
            if any(state.lora_name == name for state in engine.output_processor.request_states.values()):
                raise StateError(f"adapter {name!r} has requests in flight; unload it when they have ended")
            with ExitStack() as undo:
                if (known := models.lora_requests.pop(name, None)) is not None:
                    undo.callback(models.lora_requests.setdefault, name, known)
                await on_cores(engine, f"{ADAPTERS}/unload", data)
                undo.pop_all()
        self._hooks.adapters_used.pop(name, None)
        for key in [key for key in self._hooks.versions.adapters if key[1] == name]:
            del self._hooks.versions.adapters[key]
        return {"ok": True}

    async def forward(self, step: str, engine: Any, data: bytes) -> dict[str, Any]:
        self._hooks.install(engine)
        answers = await on_cores(engine, f"{ADAPTERS}/{step}", data)
        return {"held": sum(answer.get("held", 0) for answer in answers)}
