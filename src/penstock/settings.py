"""Settings of engines and fleets; `router_settings.py` has those of a router."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from penstock.router_settings import Positive, Seconds, Section


def _not_blank(model: str) -> str:
    if not model.strip():
        raise ValueError("give a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B")
    return model


class EngineConfig(Section):
    """One vLLM engine (R4). Names follow vLLM's options; `extra_args` passes further options through."""

    model: Annotated[str, AfterValidator(_not_blank)]
    """Path or hub name of the checkpoint."""
    tokenizer: str | None = None
    served_model_name: str | None = None
    profile: Literal["auto", "cpu", "gpu", "sim"] = "auto"
    """`cpu`: vLLM's CPU build, fast start, fp32; `gpu`: vLLM's defaults; `auto`: `gpu` if there is an NVIDIA device;
    `sim`: the simulated engine (no model is loaded)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    enable_expert_parallel: bool = False
    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    fp32_lm_head: bool = False
    """Compute logits in fp32 under a bf16 model."""
    enable_lora: bool = False
    max_loras: Positive = 1
    """Most adapters in one batch."""
    max_lora_rank: Positive = 16
    enable_return_routed_experts: bool = False
    """Report each token's experts of a mixture of experts, which the learner replays; on GPUs only."""
    enable_sleep_mode: bool = False
    """Let `sleep` free device memory; on GPUs only."""
    quantization: str | None = None
    """`int8` or `fp8`: quantise matrices by row at load and at every update (docs/how-to/weights.md). Other names are
    vLLM's own. A quantised checkpoint needs none."""
    load_format: str = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_memory_bytes: Positive | None = None
    seed: int = 0
    extra_args: Mapping[str, str | int | float | bool | tuple[str, ...] | None] = Field(default_factory=dict[str, Any])
    """Further vLLM options by their long name: `{"block-size": 64}`; true: a bare flag; a list: several values."""
    start_timeout_s: Seconds = 600.0
    control_timeout_s: Seconds = 60.0
    """Deadline of one control call (pause, resume, update, ...)."""
    request_timeout_s: Seconds = 3600.0
    """Deadline of one generation request."""


def _address(url: str) -> str:
    if not re.fullmatch(r"http://[^/\s@?#]+:\d{1,5}/*", url):  # a router takes no other form
        raise ValueError(f"a server's address is http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


class ServerSpec(Section):
    """A server that another process started, written as its URL, or as `URL#dp=2` if `dp` is 2."""

    url: Annotated[str, AfterValidator(_address)]
    dp: Positive | None = None
    """Data-parallel ranks that the router addresses one by one, each as an engine; default: all; 1: the server
    distributes requests among its ranks itself."""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        if isinstance(given, (cls, dict)):
            return cast("Any", given)
        if not isinstance(given, str):
            raise ValueError("a server is its URL or a ServerSpec; several are given one by one")  # noqa: TRY004 - pydantic's
        url, mark, ranks = given.partition("#dp=")
        return {"url": url, "dp": ranks} if mark else {"url": url}


Transport = Literal["shared_memory", "broadcast", "cuda_ipc", "disk", "delta"]
"""Transport of a weight version's bytes to the engines."""


MOST_ENGINES = 4096
"""Most engines of one fleet; a greater number is a typing error."""


class FleetConfig(Section):
    """The engines that serve one base model."""

    engines: Annotated[int, Field(ge=0, le=MOST_ENGINES)] = 1
    """Engines to launch; may be 0 if there are servers to `attach`."""
    attach: tuple[ServerSpec, ...] = ()
    """Running servers of the same model that join the fleet. The fleet never ends or restarts them. A server that dies
    joins again when it answers with confirmed weights."""
    min_engines: Positive = 1
    """Engines that must complete an update for it to be committed."""
    stream_chunk_tokens: Annotated[int, Field(ge=0)] = 64
    """Tokens in a chunk of a sample, and so the most that an engine's death costs it; 0: all tokens come at the end."""
    health_interval_s: Seconds = 1.0
    hang_timeout_s: Seconds = 15.0
    """Seconds without an answer after which an engine is ended."""
    max_restarts: Annotated[int, Field(ge=0)] | None = None
    """Restarts of one engine within `restart_window_s`; after its next death it stays dead. Default: no limit."""
    restart_window_s: Seconds = 600.0
    restart_backoff_s: Seconds = 1.0
    """Seconds before the first restart, doubled for each further one up to two minutes, until an engine has lived for
    `restart_window_s`."""
    drain_timeout_s: Seconds = 600.0
    """Seconds for a leaving engine to finish its requests."""
    stop_timeout_s: Seconds = 10.0
    weight_transport: Literal["auto", Transport] = "auto"
    """`auto`: chosen by the places of the trainer's tensors and the engines (docs/how-to/weights.md)."""
    weight_folder: Annotated[Path | None, Field(validate_default=True)] = None
    """Folder for the transports `disk` and `delta`, which trainer and engines see under the same path."""
    max_adapters: Positive = 256
    """Most LoRA adapters kept; one more evicts the least recently used that is neither in flight nor pinned."""
    weight_address: str = "127.0.0.1"
    """Address at which the trainer listens for engines, for the transport `broadcast`."""
    weight_host_copy: bool | None = None
    """For the transports `broadcast` and `cuda_ipc`: keep a copy in host memory, for engines of this host that join or
    return between updates; default: while the fleet has one engine."""
    log_dir: Path | None = None
    """Folder of engine and router logs; default: a temporary folder, kept after a failure."""

    @field_validator("weight_folder")
    @classmethod
    def _files_need_a_folder(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        transport = info.data.get("weight_transport")
        if folder is None and transport in {"disk", "delta"}:
            raise ValueError(f"the transport {transport!r} needs a folder")
        return folder

    launcher: Literal["local", "ray"] = "local"
    """`local`: engines are processes of this machine; `ray`: each has an actor and a placement group of Ray."""
    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """Ray cluster, as for `ray.init`; default: RAY_ADDRESS, else the cluster of this process, else a new one on this
    machine, which ends with the fleet."""
    ray_cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs that Ray reserves for each engine; default: one for each of its ranks."""
    ray_gpus: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each GPU that Ray reserves for an engine, so that a trainer's actor can have the rest; default: 1."""
    ray_placement_group: Annotated[str, Field(pattern="^[0-9a-f]+$")] | None = None
    """Id (`group.id.hex()`) of a placement group, whose bundles the engines take in order, one for each GPU; default:
    each engine has its own group."""

    @field_validator("ray_address", "ray_cpus", "ray_gpus", "ray_placement_group")
    @classmethod
    def _of_ray(cls, given: str | float | None, info: ValidationInfo) -> str | float | None:
        default = cls.model_fields[str(info.field_name)].default  # a config written to a file holds it
        if given != default and info.data.get("launcher") == "local":
            raise ValueError("has an effect with the launcher 'ray' only")
        return given
