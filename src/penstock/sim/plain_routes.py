"""A server without Penstock's plugin: what plain vLLM, as its owner started it, has of our control endpoints."""

from __future__ import annotations

from aiohttp import web

from penstock.sim.answers import RANKS, error_answer, json_answer
from penstock.sim.config import SimConfig

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
