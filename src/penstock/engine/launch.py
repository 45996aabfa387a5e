"""Launches an engine server: command line, environment and process, and the reason if it does not start."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

import orjson

from penstock.aio import settled
from penstock.errors import ConfigError, EngineStartError, PenstockError
from penstock.http import HttpTransport
from penstock.plugin import LOADER_VARIABLE, QUANTISING_LOADER
from penstock.process import ChildProcess
from penstock.process_group import remove_leftovers
from penstock.rooms import plugged_in
from penstock.settings import EngineConfig
from penstock.start_report import says

CPU_KV_CACHE_BYTES = 64 * 2**20
CPU_BLOCK_SIZE = 32
"""With vLLM's default for CPUs, 128, short prompts never hit the prefix cache."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command to execute: `argv`, and variables to add to our environment, including the key."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


def resolve_profile(config: EngineConfig) -> Literal["cpu", "gpu", "sim"]:
    """Return the profile. `auto` is `gpu` if there is an NVIDIA device, else `cpu`."""
    if config.profile != "auto":
        return config.profile
    return "gpu" if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists() else "cpu"


def server_command(
    config: EngineConfig, *, port: int, api_key: str | None, host: str = "127.0.0.1", gpus: Sequence[str] = (),
    native: str | None = None,
) -> ServerCommand:  # fmt: skip
    """Build the command of one engine server that sees `gpus` (none: all).

    `gpus` is as in CUDA_VISIBLE_DEVICES. `native`: vLLM's own weight transfer (`nccl`) replaces Penstock's parts.

    Raises:
        ConfigError: the model path does not exist, or vLLM cannot run it with this layout or quantisation.
    """
    profile = resolve_profile(config)
    if profile == "sim":
        return _sim_command(config, port=port, api_key=api_key, host=host)
    check_model(config.model)
    shape = plugged_in("layouts.check")(config, profile)
    options = _options(config, port, host, native)
    # Every user of the machine can read a command line, so the key is in the environment. The variables are set even
    # without a key: an engine must not require a key from our environment, nor see the key of clients.
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": api_key or "",
        "PENSTOCK_API_KEY": "",
        "PENSTOCK_CONTROL_HOST": host,  # read by `plugin/core_http.py`
    }
    if config.enable_lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.enable_return_routed_experts:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only runner that reports experts
    if profile == "gpu" and config.dtype == "float32":
        # Else attention rounds its products to TF32, and some logprobs are wrong by 0.07 nats.
        env["TRITON_F32_DEFAULT"] = os.environ.get("TRITON_F32_DEFAULT", "ieee")
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
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
        options |= plugged_in("quantise.options")(config, profile, shape)
    if quantised := options.pop("quantization_config", None):
        ours["quantization_config"] = quantised
        env[LOADER_VARIABLE] = QUANTISING_LOADER
    options["hf-overrides"] = _hf_overrides(ours, options.get("hf-overrides"))
    argv = [sys.executable, "-m", "penstock.plugin.server", *_arguments(options)]
    return ServerCommand(tuple(argv), env)


Option = str | int | float | bool | None | tuple[str, ...]


_SAME_NAME = (
    "model", "tokenizer", "served_model_name", "dtype", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "enable_expert_parallel", "max_model_len", "max_num_seqs", "enable_prefix_caching",
    "enforce_eager", "enable_lora", "enable_return_routed_experts", "enable_sleep_mode", "load_format",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "seed",
)  # fmt: skip
"""Fields of `EngineConfig` that are vLLM options of the same name."""


def _options(config: EngineConfig, port: int, host: str, native: str | None) -> dict[str, Option]:
    """Map vLLM's option names to values. True: a bare flag; None, False: omitted."""
    given: dict[str, Option] = {name.replace("_", "-"): getattr(config, name) for name in _SAME_NAME}
    return {
        **given,
        "host": host,
        "port": port,
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


def _sim_command(config: EngineConfig, *, port: int, api_key: str | None, host: str) -> ServerCommand:
    options = {"host": host, "port": port, **plugged_in("launch.simulated")(config)}
    given = (f"{name.replace('-', '_')}={value}" for name, value in options.items() if value is not None)
    return ServerCommand((sys.executable, "-m", "penstock.sim", *given), {"PENSTOCK_API_KEY": api_key or ""})


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
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(f"model path {model} {what}; give a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B")


PROBE_S = 0.2
"""Seconds between two readiness probes. vLLM's port is its only sign of readiness, so there is no event."""


class EngineProcess(ChildProcess):
    """A launched engine server."""

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        name: str,
        log_dir: Path,
        api_key: str | None = None,
        gpus: Sequence[str] = (),
        host: str = "127.0.0.1",
        native: str | None = None,
    ) -> Self:
        """Start a server that sees `gpus` (none: all) on a free port of `host`, and wait.

        Raises:
            ConfigError: the model path is wrong. No process was started.
            EngineStartError: it ended, or was not ready within `config.start_timeout_s` seconds. It is gone, and the
                message has the relevant lines of its log.
        """
        with reserved_port(host) as port:  # vLLM listens on the port only seconds later
            command = server_command(config, port=port, api_key=api_key, host=host, gpus=gpus, native=native)
            # For sockets between its processes. Not in TMPDIR, because a socket's name has at most 107 bytes.
            scratch = Path(tempfile.mkdtemp(prefix="penstock-e-", dir="/tmp"))
            env = {**command.env, "VLLM_RPC_BASE_PATH": str(scratch)}
            log = log_dir / f"{name}.log"
            async with AsyncExitStack() as undo:
                undo.callback(remove_leftovers, (), scratch)
                engine = await cls.start(command.argv, name=name, log=log, env=env, scratch=scratch)
                undo.pop_all()  # the child itself removes its folder
                undo.push_async_callback(engine.wait)
                undo.callback(engine.kill)
                engine.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                await engine.ready(config, api_key)
                undo.pop_all()
            engine.remember()
            return engine

    async def ready(self, config: EngineConfig, api_key: str | None) -> None:
        """Return once it answers. EngineStartError: it ended or is too slow."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(config.start_timeout_s):
                probe = await settled(self._probe(api_key), self.wait())
                if not probe.cancelled():
                    return probe.result()
                what = f"ended with status {await self.wait()} after {time.monotonic() - begin:.0f} s"
        except TimeoutError:
            what = f"was not ready within {config.start_timeout_s:.0f} s (engine.start_timeout_s)"
        raise EngineStartError(
            f"the {resolve_profile(config)} server for model {config.model} {what}; {says(self)}", engine=self.name
        )

    async def _probe(self, api_key: str | None) -> None:
        http = HttpTransport(self.url, api_key=api_key, name=self.name)
        try:
            while True:
                with suppress(PenstockError):
                    await http.get_text("/health", timeout_s=5.0)
                    return
                await asyncio.sleep(PROBE_S)
        finally:
            await http.close()


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Generator[int]:
    """Reserve a free TCP port of the IP address `host` during the block.

    A server that sets SO_REUSEADDR, as servers do, can still listen on it, because no socket listens here.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
