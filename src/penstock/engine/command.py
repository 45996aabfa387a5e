"""Makes an engine server's command: its options and environment, checked against model and device."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from penstock.engine import layouts
from penstock.engine.launch import ServerCommand
from penstock.errors import ConfigError
from penstock.plugin import LOADER_VARIABLE, QUANTISING_LOADER
from penstock.settings import EngineConfig

CPU_KV_CACHE_BYTES = 64 * 2**20
CPU_BLOCK_SIZE = 32
"""With vLLM's default for CPUs, 128, short prompts never hit the prefix cache."""


def resolve_profile(config: EngineConfig) -> Literal["cpu", "gpu", "sim"]:
    """Return the profile. `auto` is `gpu` if there is an NVIDIA device, else `cpu`."""
    if config.profile != "auto":
        return config.profile
    return "gpu" if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() else "cpu"


def server_command(
    config: EngineConfig, *, api_key: str | None = None, host: str = "127.0.0.1", native: str | None = None
) -> ServerCommand:
    """Build the command of engine servers, for any port and GPUs.

    `native`: vLLM's own weight transfer (`nccl`) replaces Penstock's parts.

    Raises:
        ConfigError: the model path does not exist, or vLLM cannot run it with this layout or quantisation.
    """
    profile = resolve_profile(config)
    what = f"the {profile} server for model {config.model}"
    command = partial(ServerCommand, what=what, start_timeout_s=config.start_timeout_s, api_key=api_key, host=host)
    if profile == "sim":
        options = {"host": host, **layouts.simulated_options(config)}
        given = (f"{name.replace('-', '_')}={value}" for name, value in options.items() if value is not None)
        argv = (sys.executable, "-m", "penstock.sim", *given)
        return command(argv, {"PENSTOCK_API_KEY": api_key or ""}, port_option="port={}")
    check_model(config.model)
    shape = layouts.check(config, profile)
    options = _options(config, host, native)
    # Every user of the machine can read a command line, so the key is in the environment. The variables are set even
    # without a key: an engine must not require a key from our environment, nor see the key of clients.
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": api_key or "",
        "PENSTOCK_API_KEY": "",
        "PENSTOCK_CONTROL_HOST": host,  # read by `plugin/core.py`
    }
    if config.enable_lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.enable_return_routed_experts:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only runner that reports experts
    if profile == "gpu" and config.dtype == "float32":
        # Else attention rounds its products to TF32, and some logprobs are wrong by 0.07 nats.
        env["TRITON_F32_DEFAULT"] = os.environ.get("TRITON_F32_DEFAULT", "ieee")
    if profile == "cpu":
        env.update(_cpu_env(config))
        options.update(_cpu_options(config))
    options.update({name.removeprefix("--").replace("_", "-"): value for name, value in config.extra_args.items()})
    if profile == "gpu" and config.enable_lora and options.get("dtype") == "float32":
        raise ConfigError(
            "engine.enable_lora: vLLM's LoRA kernels for GPUs need engine.dtype bfloat16 or float16, got float32"
        )
    ours: dict[str, Any] = {"head_dtype": "float32"} if config.fp32_lm_head else {}
    if config.quantization:
        options |= layouts.quantised_options(config, profile, shape)
    if quantised := options.pop("quantization_config", None):
        ours["quantization_config"] = quantised
        env[LOADER_VARIABLE] = QUANTISING_LOADER
    options["hf-overrides"] = _hf_overrides(ours, options.get("hf-overrides"))
    argv = [sys.executable, "-m", "penstock.plugin.server", *_arguments(options)]
    return command(tuple(argv), env)


Option = str | int | float | bool | None | tuple[str, ...]


_SAME_NAME = (
    "model", "tokenizer", "served_model_name", "dtype", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "enable_expert_parallel", "max_model_len", "max_num_seqs", "enable_prefix_caching",
    "enforce_eager", "enable_lora", "enable_return_routed_experts", "enable_sleep_mode", "load_format",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "seed",
)  # fmt: skip
"""Fields of `EngineConfig` that are vLLM options of the same name."""


def _options(config: EngineConfig, host: str, native: str | None) -> dict[str, Option]:
    """Map vLLM's option names to values. True: a bare flag; None, False: omitted."""
    given: dict[str, Option] = {name.replace("_", "-"): getattr(config, name) for name in _SAME_NAME}
    return {
        **given,
        "host": host,
        "no-enable-prefix-caching": not config.enable_prefix_caching,
        "max-loras": config.max_loras if config.enable_lora else None,
        "max-lora-rank": config.max_lora_rank if config.enable_lora else None,
        # An RL loss needs log-softmax(logits / T), but vLLM's default ignores the temperature.
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": orjson.dumps({"backend": native}).decode() if native else None,
        "worker-extension-cls": None if native else "penstock.plugin.worker.WorkerExtension",
        "middleware": None if native else "penstock.plugin.middleware.PenstockMiddleware",
        "disable-uvicorn-access-log": True,
    }


def _hf_overrides(ours: Mapping[str, Any], given: Option) -> Option:
    """Add our overrides of the model's config to the caller's (JSON)."""
    if not ours:
        return given
    try:
        overrides: Any = orjson.loads(str(given)) if given is not None else {}
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"extra_args: hf-overrides {given!r} is not valid JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"extra_args: hf-overrides {given!r} must be a JSON object")
    return orjson.dumps({**cast("dict[str, Any]", overrides), **ours}).decode()


def _cpu_options(config: EngineConfig) -> dict[str, Option]:
    options: dict[str, Option] = {
        "enforce-eager": True,
        "block-size": CPU_BLOCK_SIZE,
        "gpu-memory-utilization": None,
        # If the prefill of a seeded request is cut in chunks, a CPU engine dies ("CPU Generator does not use offset",
        # vLLM 0.32). After an update many requests are prefilled at once.
        "no-enable-chunked-prefill": True,
    }
    if config.dtype == "auto":
        options["dtype"] = "float32"
    if config.kv_cache_memory_bytes is None:
        options["kv-cache-memory-bytes"] = CPU_KV_CACHE_BYTES
    return options


def _cpu_env(config: EngineConfig) -> dict[str, str]:
    # One process for core and worker, and no kernel compilation: half the default's start time and memory.
    env = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    if ranks == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # Without this, OpenMP threads of several engines compete for the cores: about ten times slower.
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return env


def _arguments(options: dict[str, Option]) -> Sequence[str]:
    arguments: list[str] = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None and value is not False:
            arguments += [f"--{name}", *(value if isinstance(value, tuple) else (str(value),))]
    return arguments


def check_model(model: str) -> None:
    """Raise ConfigError for a path without a checkpoint. A hub name passes."""
    if "://" in model:  # a bucket; vLLM checks it
        return
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", ".", "~")) or path.exists() or model.count("/") > 1
    if looks_like_path and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        if what == "does not exist" and not path.is_absolute():
            what = f"does not exist in {Path.cwd()}"
        raise ConfigError(f"model path {model} {what}; give a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B")
