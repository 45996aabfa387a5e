"""The one configuration tree: YAML files and `key=value` overrides, validated as a whole before anything starts.

Each section is a frozen pydantic model. An unknown key, a wrong type or a value out of range is a `ConfigError` of one
line, which names the key and, for a typo, the nearest known key.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.errors import ConfigError
from penstock.section import Section, read_yaml, validate
from penstock.types import KV

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^\w[\w.+-]*$", coerce_numbers_to_str=True)]


class EngineConfig(Section):
    """One vLLM engine (R4). Names follow vLLM's options; `extra_args` passes anything else through."""

    model: str
    """Path or hub name of the checkpoint."""
    tokenizer: str | None = None
    served_model_name: str | None = None
    profile: Literal["auto", "cpu", "gpu", "sim"] = "auto"
    """`cpu`: vLLM's CPU build, fast start, fp32; `gpu`: vLLM's defaults; `auto`: `gpu` where an NVIDIA
    device is; `sim`: the simulated engine (no model is loaded)."""
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
    """Adapters in one batch."""
    max_lora_rank: Positive = 16
    enable_sleep_mode: bool = False
    """`sleep` frees device memory; on GPUs only."""
    quantization: str | None = None
    load_format: str = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_memory_bytes: Positive | None = None
    seed: int = 0
    extra_args: Mapping[str, str | int | float | bool | None] = Field(default_factory=dict[str, Any])
    """More vLLM options by their long name: `{"block-size": 64}`; true is a bare flag."""
    start_timeout_s: Seconds = 600.0
    control_timeout_s: Seconds = 60.0
    """Deadline of one control call (pause, resume, update, ...)."""
    request_timeout_s: Seconds = 3600.0
    """Deadline of one generation request."""


PolicyName = Literal[
    "bounded-sticky",
    "sticky-least-loaded",
    "consistent-hash",
    "prefix-aware",
    "kv-cache",
    "requests",
    "power-of-two",
    "round-robin",
    "random",
]


def _policy_names(given: object) -> str:
    """Read names, in a list or with commas between them, as a text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not names:
        raise ValueError("must be the name of a policy, or a list of such names")
    stripped = [str(name).strip() for name in cast("Sequence[object]", names)]
    known = get_args(PolicyName)
    for place, name in enumerate(stripped):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"there is no policy {name!r}; {hint}")
        if name in stripped[:place]:
            raise ValueError(f"{name!r} is named twice")
    return ",".join(stripped)


def _names(given: object) -> str:
    """Read texts, in a list or with commas between them, as a text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)):
        raise ValueError("must be a list, or texts with commas between them")  # noqa: TRY004 - pydantic's
    return ",".join(str(name).strip() for name in cast("Sequence[object]", names) if str(name).strip())


class RouterConfig(Section):
    """The data plane in front of a fleet."""

    kind: Literal["penstock", "vllm-router"] = "penstock"
    """`vllm-router`: the one that runs at `url` instead of ours, with what it can do (docs/how-to/other-servers.md)."""
    url: Annotated[str, Field(pattern=r"^http://[^/\s]+$")] | None = None
    """Address of a running router of this kind, which gets this fleet's engines; default: a new router is started."""
    host: str = "127.0.0.1"
    port: Port = 0
    """0: any free port."""
    policy: Annotated[str, BeforeValidator(_policy_names)] = "bounded-sticky"
    """A `PolicyName`, or several: a policy without a preference leaves the choice to the next."""
    prefix_length: Positive = 2048
    """Shortest shared prefix, in tokens, for which an engine is preferred."""
    overload_threshold: Annotated[float, Field(ge=1)] = 1.5
    """`prefix-aware` skips an engine with more outstanding requests than this multiple of the mean."""
    balance_factor: Annotated[float, Field(ge=1)] = 1.1
    """`bounded-sticky` places up to this multiple of the mean of resident tokens, plus `slack_tokens`."""
    slack_tokens: Annotated[int, Field(ge=0)] = 8192
    kv_admission: Annotated[float, Field(gt=0)] = 0.92
    """`bounded-sticky`: new sessions wait while resident and expected context exceed this share of every KV cache."""
    session_ttl_s: Seconds = 1800.0
    """A session is forgotten after so long without a request."""
    engine_metrics_interval_s: Annotated[float, Field(ge=0)] = 1.0
    """Between two reads of an engine's KV usage; 0: never."""
    workers: Positive = 1
    """Processes that share the port."""
    max_hold_s: Seconds = 300.0
    """A request waits so long while no engine can serve it; then 503 with Retry-After."""
    max_held: Positive = 100_000
    """Most requests that wait for a gate, an engine, or room on one."""
    max_held_bytes: Positive = 4 * 2**30
    """Most bytes kept of waiting requests; of each, 1 MiB at most."""
    max_header_bytes: Positive = 65_536
    max_body_bytes: Positive = 256 * 2**20
    header_timeout_s: Seconds = 20.0
    body_timeout_s: Seconds = 600.0
    """Deadline of a request's whole body; time in which the router does not read it does not count."""
    data_paths: Annotated[str, BeforeValidator(_names), Field(pattern=r"^(/[0-9A-Za-z._~/-]+(,|$))*$")] = ""
    """Further paths that go to engines, exactly as written, in a list or with commas."""
    allowed_hosts: Annotated[str, BeforeValidator(_names)] = ""
    """Further names of this router that `Host` may have in calls to `/router/*`, in a list or with commas."""
    access_log: bool = False
    """One JSON line a request in the router's log."""


def refuse_open_host(host: str, api_key: str | bytes | None) -> None:
    """Raise ConfigError if a router would listen for other machines on `host` without a key."""
    if api_key or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, or empty for every address
        loopback = False
    if not loopback:
        raise ConfigError(
            f"router.host {host!r} opens the router to other machines and there is no API key; set one (of penstock "
            "serve: PENSTOCK_API_KEY, of Fleet.launch: api_key, of the router: --api-key-env), or keep 127.0.0.1"
        )


class ServerSpec(Section):
    """A server that another process started; written as its URL, or `URL#dp=2` where `dp` is 2."""

    url: str
    dp: Positive | None = None
    """Data-parallel ranks that the router addresses one by one, each as an engine; default: all. 1: the server places
    requests on its ranks itself."""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        fields = {"url": given} if isinstance(given, str) else given
        if not isinstance(fields, dict):
            return fields
        known = cast("dict[str, Any]", fields)
        if "url" not in known:
            return known
        url, mark, ranks = str(known["url"]).partition("#")
        if not re.fullmatch(r"http://[^/\s]+/*", url):
            raise ValueError("a server's address is http://HOST:PORT")
        if mark and not (ranks.startswith("dp=") and ranks[3:].isdigit()):
            raise ValueError("behind # only dp=N can stand, the number of data-parallel ranks")
        return {**known, "url": url.rstrip("/"), **({"dp": int(ranks[3:])} if mark else {})}


Transport = Literal["shared_memory", "broadcast", "cuda_ipc", "disk", "delta"]
"""Way of a weight version's bytes to the engines."""


MOST_ENGINES = 4096
"""Of one fleet; a greater number is a typing error."""


class FleetConfig(Section):
    """The engines that serve one base model."""

    engines: Annotated[int, Field(ge=0, le=MOST_ENGINES)] = 1
    """Engines to launch; may be 0 where there are servers to `attach`."""
    attach: tuple[ServerSpec, ...] = ()
    """Running servers of the same model that join the fleet. The fleet never ends or restarts them; one that dies is
    out, and joins again when it answers with confirmed weights."""
    min_engines: Positive = 1
    """An update counts as committed if at least this many engines made it."""
    stream_chunk_tokens: Annotated[int, Field(ge=0)] = 64
    """Tokens in a chunk of a sample, the most that an engine's death costs it. 0: all tokens come at the end."""
    health_interval_s: Seconds = 1.0
    hang_timeout_s: Seconds = 15.0
    """An engine that answers nothing for so long is ended."""
    max_restarts: Annotated[int, Field(ge=0)] | None = None
    """Restarts of one engine within `restart_window_s`; after its next death it stays dead. Default: no limit."""
    restart_window_s: Seconds = 600.0
    restart_backoff_s: Seconds = 1.0
    """Wait before the first restart; it doubles for each further one, up to two minutes, until an engine has lived for
    `restart_window_s`."""
    drain_timeout_s: Seconds = 600.0
    """Time for an engine that leaves to finish its requests."""
    stop_timeout_s: Seconds = 10.0
    weight_transport: Literal["auto", Transport] = "auto"
    """`auto`: chosen by where the trainer's tensors and the engines are (docs/how-to/weights.md)."""
    weight_folder: Annotated[Path | None, Field(validate_default=True)] = None
    """For the transports `disk` and `delta`; trainer and engines see it under the same path."""
    max_adapters: Positive = 256
    """LoRA adapters that are kept; one more evicts the one used least recently, never one in flight or pinned."""
    weight_address: str = "127.0.0.1"
    """For the transport `broadcast`: address at which the trainer listens for engines."""
    weight_host_copy: bool | None = None
    """For the transports `broadcast` and `cuda_ipc`: keep a copy in host memory, for engines of this host that join or
    return between updates. Default: while the fleet has one engine."""
    log_dir: Path | None = None
    """Folder of engine and router logs; default: a temporary folder, kept when something failed."""

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
    """Ray cluster, as `ray.init` takes it; default: RAY_ADDRESS, else the cluster of this process, else a new one on
    this machine, which ends with the fleet."""
    ray_cpus: Annotated[float, Field(ge=0)] | None = None
    """CPUs that Ray sets aside for each engine; default: one for each of its ranks."""
    ray_gpus: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share that Ray sets aside of each GPU of an engine, so that a trainer's actor can have the rest; default: 1."""
    ray_placement_group: Annotated[str, Field(pattern="^[0-9a-f]+$")] | None = None
    """Id (`group.id.hex()`) of a placement group, whose bundles the engines take in their order, one for each GPU;
    default: each engine has a group of its own."""

    @field_validator("ray_address", "ray_cpus", "ray_gpus", "ray_placement_group")
    @classmethod
    def _of_ray(cls, given: str | float | None, info: ValidationInfo) -> str | float | None:
        default = cls.model_fields[str(info.field_name)].default  # a config that is written out holds it
        if given != default and info.data.get("launcher") == "local":
            raise ValueError("has an effect with the launcher 'ray' only")
        return given


class EnvironmentConfig(Section):
    """What the policy is trained on."""

    name: str = "reasoning_gym"
    """`reasoning_gym`, or `module:Class` of your own environment."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any])


class RolloutConfig(Section):
    """How episodes are made."""

    groups_per_batch: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 8  # the advantage of a single sample is always 0
    max_tokens: Positive = 64
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    concurrency: Positive = 1024
    """Most samples in flight."""
    max_turns: Positive = 8
    """Most responses of an episode, of an environment that overrides `step`; `max_tokens` is that of one of them."""
    max_episode_tokens: Positive = 4096
    """Most tokens of such an episode after its prompt."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, top_p: float) -> float:
        if top_p < 1:
            raise ValueError(
                f"{top_p} cannot be trained on: engines then give logprobs over the kept tokens alone and the learner "
                "over the whole vocabulary, so importance weights would be wrong; leave it at 1"
            )
        return top_p


class LoraConfig(Section):
    """One low-rank adapter that is trained in place of the weights."""

    name: Name = "policy"
    """At the engines."""
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter's product counts alpha / rank times; default: once."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    merge: bool = False
    """Send engines the merged weights, all of them, and no adapter."""


class TrainConfig(Section):
    """The learner and its schedule."""

    steps: Positive = 80
    schedule: Literal["async", "one_step_off", "sync", "colocated"] = "async"
    """`colocated`: learner and engines share GPUs in turn; see `penstock.train.schedules` for each."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(gt=0)] = 1.0
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = "dapo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    correction: Literal["tis", "mis", "icepop", "dppo", "sequence_mask", "none"] = "tis"
    """Of tokens that older weights made; see `penstock.train.losses`. `none` needs a schedule without such tokens."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the KL divergence from the model that the run starts from, added to the loss; without `lora` that takes a
    second copy of the model."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the policy's entropy, taken from the loss."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """`tis`: truncation of the trainer/engine importance weight."""
    ratio_band: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1)]] = (0.5, 5.0)
    """`mis` and `icepop`: least and largest importance weight kept."""
    probability_gap: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`dppo`: difference of probabilities from which a token is dropped."""
    sequence_gap: Annotated[float, Field(gt=0)] = 0.2
    """`sequence_mask`: mean logprob gap, in nats, from which a sequence of negative advantage is dropped."""
    advantage: Literal["group_norm", "group_mean", "leave_one_out"] = "group_norm"
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """`async`: largest trainer version minus the version that made a token, at the time of training on it."""
    kv: KV = "keep_in_flight"
    """Of requests in flight when weights change; see `Engine.update_weights`."""
    micro_batch_tokens: Positive = 16_384
    checkpoint_every: Positive = 20
    ranks: Positive = 1
    """Processes that share the model (FSDP2): each with a GPU of its own, or on CPUs."""
    threads: Positive | None = None
    """Torch threads of the learner; default: torch's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which matrices are multiplied; weights and optimiser are in fp32. `auto`: bfloat16 on CUDA, else float32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes anew of each layer, to save memory: nothing, all but attention, or all."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in the host's memory."""
    lora: LoraConfig | None = None
    """Train one adapter; default: all weights."""
    compile: bool = False
    """Compile each decoder layer: minutes at the first step, faster from then on."""

    logprob_alarm: Annotated[float, Field(gt=0)] = 0.1
    """Mean |trainer logprob - engine logprob| over tokens of equal weights, in nats, from which a step warns."""

    @property
    def staleness(self) -> int:
        """Largest age of a token under the schedule, in versions."""
        return {"async": self.max_staleness, "one_step_off": 1}.get(self.schedule, 0)

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        if self.staleness and self.correction == "none":
            raise ValueError(
                "correction: none trains on older tokens as if they were new; choose tis, mis, icepop, dppo or "
                "sequence_mask, or schedule: sync"
            )
        return self

    @model_validator(mode="after")
    def _offloadable(self) -> Self:
        # Other saved tensors are the layers' weights too, which would be copied with each layer.
        if self.offload_activations and (self.recompute == "none" or (self.recompute == "selective" and self.compile)):
            raise ValueError(
                "offload_activations keeps the inputs of recomputed layers: choose recompute: full, or selective "
                "without compile"
            )
        return self


class EvalConfig(Section):
    """Held-out evaluation: greedy, exact match, before and after."""

    size: Positive = 512
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations in the middle; 0: none."""


class RunConfig(Section):
    """A whole training run: what `penstock train` reads."""

    name: Name = "run"
    """Also the run folder's name, so it is no path."""
    seed: int = 0
    run_dir: Path = Path("runs")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    engine: EngineConfig
    router: RouterConfig = RouterConfig()
    fleet: FleetConfig = FleetConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _serves_adapters(self) -> Self:
        lora, engine = self.train.lora, self.engine
        if lora is None or lora.merge or (engine.enable_lora and engine.max_lora_rank >= lora.rank):
            return self
        raise ValueError(
            f"train.lora sends engines an adapter of rank {lora.rank}, and engine.enable_lora is "
            f"{str(engine.enable_lora).lower()} with max_lora_rank {engine.max_lora_rank}: set both to match, or "
            "train.lora.merge: true"
        )

    @model_validator(mode="after")
    def _fits_its_ranks(self) -> Self:
        if (refused := self.refused_ranks(self.train.ranks)) is not None:
            raise ValueError(refused)
        return self

    def refused_ranks(self, count: int) -> str | None:
        """Say why a learner of `count` ranks cannot run this; None: it can."""
        if count == 1:
            return None
        if self.train.kl_coefficient and self.train.lora is None:
            return (
                "train.kl_coefficient needs a second model, which a learner of several ranks does not hold: train an "
                "adapter (train.lora), whose base is the reference, or train on one rank"
            )
        if self.fleet.weight_transport == "cuda_ipc":
            return (
                "fleet.weight_transport: cuda_ipc shows engines weights that stay where they are, and a learner of "
                f"{count} ranks gathers them layer by layer: set it to auto, shared_memory or broadcast"
            )
        return None


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides (values are YAML), and validate the whole.

    Raises:
        ConfigError: one line that names the key.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            loaded: object = read_yaml(file.read_text())
        except FileNotFoundError:
            raise ConfigError(f"no such config file: {file}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read config file {file}: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"{file} must hold a mapping of sections, not {type(loaded).__name__}")
        tree = cast("dict[str, Any]", loaded)
    for override in overrides:
        _apply_override(tree, override)
    return validate(RunConfig, tree)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child: Any = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
        node = cast("dict[str, Any]", child)
    node[last] = value
