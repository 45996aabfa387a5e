"""Settings of engines, router and fleet, and the base of every configuration section."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.checks import LARGEST, did_you_mean
from penstock.errors import ConfigError
from penstock.rooms import plugged_in

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
LAST_PORT = 65_535
Port = Annotated[int, Field(ge=0, le=LAST_PORT)]


class Section(BaseModel):
    """Base of every section: frozen, closed to unknown keys, and every number finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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


PolicyName = Literal["bounded-sticky", "prefix-aware", "kv-cache", "requests", "round-robin"]


def _names(given: object) -> str:
    """Read texts, in a list or separated by commas, as a text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)):
        raise ValueError("must be a list, or texts with commas between them")  # noqa: TRY004 - pydantic's
    return ",".join(str(name).strip() for name in cast("Sequence[object]", names) if str(name).strip())


def _policy_names(given: str) -> str:
    if not given:
        raise ValueError("must be the name of a policy, or a list of such names")
    names, known = given.split(","), get_args(PolicyName)
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"there is no policy {name!r}; {did_you_mean(name, known)}")
        if name in names[:place]:
            raise ValueError(f"{name!r} is named twice")
    return given


def _data_paths(names: str) -> str:
    """Refuse a path for one engine only, or one that servers read in different ways."""
    for name in filter(None, names.split(",")):
        if (kind := plugged_in("router.unserved.kind")(name.encode())) != "other":
            raise ValueError(f"cannot have {name!r}: that is {kind}, and not a call that any engine may answer")
    return names


class RouterConfig(Section):
    """The data plane in front of a fleet."""

    kind: Literal["penstock", "vllm-router"] = "penstock"
    """`vllm-router`: the router at `url` instead of ours, with its own features (docs/how-to/other-servers.md)."""
    url: Annotated[str, Field(pattern=r"^http://[^/\s]+$")] | None = None
    """Address of a running router of this kind, which gets this fleet's engines; default: start a new router."""
    host: str = "127.0.0.1"
    port: Port = 0
    """0: any free port."""
    control_port: Port = 0
    """Port of control calls, as the fleet's to its router; 0: any free one. Of several workers, each has the next."""
    policy: Annotated[str, BeforeValidator(_names), AfterValidator(_policy_names)] = "bounded-sticky"
    """One or more `PolicyName`; a policy without a preference passes to the next."""
    prefix_length: Annotated[Positive, Field(le=LARGEST)] = 2048
    """Shortest shared prefix, in tokens, for which an engine is preferred."""
    overload_threshold: Annotated[float, Field(ge=1)] = 1.5
    """`prefix-aware` skips an engine with more outstanding requests than this multiple of the mean."""
    balance_factor: Annotated[float, Field(ge=1)] = 1.1
    """`bounded-sticky` places up to this multiple of the mean of resident tokens, plus `slack_tokens`."""
    slack_tokens: Annotated[int, Field(ge=0)] = 8192
    kv_admission: Annotated[float, Field(gt=0)] = 0.92
    """`bounded-sticky`: new sessions wait while resident and expected tokens exceed this share of every KV cache."""
    session_ttl_s: Seconds = 1800.0
    """Seconds without a request after which a session is forgotten."""
    engine_metrics_interval_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two reads of an engine's KV usage; 0: never."""
    workers: Positive = 1
    """Processes that share the port."""
    max_hold_s: Seconds = 300.0
    """Most seconds that a request waits for an engine that can serve it; then 503 with Retry-After."""
    max_held: Positive = 100_000
    """Most requests that wait for a gate, an engine, or room on one."""
    max_held_bytes: Positive = 4 * 2**30
    """Most bytes kept of requests that wait or come in pieces, until their answers begin; then 503. They take up to 1.2
    times as much memory, since buffers of bodies in pieces grow ahead."""
    max_header_bytes: Positive = 65_536
    max_body_bytes: Positive = 256 * 2**20
    header_timeout_s: Seconds = 20.0
    body_timeout_s: Seconds = 600.0
    """Deadline of a request's whole body, without the time in which the router does not read it."""
    data_paths: Annotated[
        str, BeforeValidator(_names), Field(pattern=r"^(/[0-9A-Za-z._~/-]+(,|$))*$"), AfterValidator(_data_paths)
    ] = ""
    """Further paths, exactly as written, that go to engines; a list or separated by commas."""
    allowed_hosts: Annotated[str, BeforeValidator(_names)] = ""
    """Further names of this router for `Host` in calls to `/router/*`; a list or separated by commas."""
    access_log: bool = False
    """Write one JSON line per request to the router's log."""


KEY_ENV, ADMIN_KEY_ENV = "PENSTOCK_API_KEY", "PENSTOCK_ROUTER_ADMIN_KEY"
"""Environment variables for a router's key of clients, and its key of calls that change it. On the command line, every
user of the machine could read them."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on `host`; unknown: False."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_host(host: str, api_key: str | bytes | None) -> None:
    """Raise ConfigError if a router would listen to other machines without a key."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"router.host {host!r} opens the router to other machines and there is no API key; set one (of penstock "
            f"serve and the router: {KEY_ENV}, of Fleet.launch: api_key), or keep 127.0.0.1"
        )


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
