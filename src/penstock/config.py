"""The configuration tree of a run: YAML files and `key=value` overrides, validated as a whole before a start.

Each section is a frozen pydantic model. An unknown key, a wrong type or a value out of range is a `ConfigError` of one
line, which names the key and, for a typo, the nearest known key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.checks import did_you_mean
from penstock.control_types import KV
from penstock.errors import ConfigError, UserError
from penstock.options import validate
from penstock.router_settings import Positive, RouterConfig, Seconds, Section
from penstock.settings import EngineConfig, FleetConfig


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError("must be a name and no path: letters, digits, _, and after the first also . + -")
    return name


LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


def _loss_name(name: str) -> str:
    if name not in LOSSES and ":" not in name:
        raise ValueError(f"there is no loss {name!r}; {did_you_mean(name, LOSSES)}; or 'module:function' of your own")
    return name


Name = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_plain_name)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class EnvironmentConfig(Section):
    """The environment that the policy is trained on."""

    name: str = "reasoning_gym"
    """`reasoning_gym`, `skyrl-gym:ID`, `verifiers:ID`, or `module:Class` of your own environment."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any])


class AgentConfig(Section):
    """An agent that plays each episode over chat, Responses or Anthropic messages (docs/how-to/agents.md)."""

    command: tuple[str, ...] = ()
    """Words of a command, in which `{prompt}`, `{model}` and `{base_url}` are filled in."""
    callable: str | None = None
    """Instead of a command: `module:name` of an `async def` that takes an Episode and returns its reward, or None."""
    concurrency: Positive = 64
    """Most episodes at once."""
    timeout_s: Seconds = 600.0
    """Most seconds of an episode; a longer one has the reward 0."""
    policy: Literal["extend", "faithful"] = "extend"
    tool_parser: str | None = None
    """Name of vLLM's tool-call parser, for model families without `<tool_call>`; null: our own."""
    reasoning_parser: str | None = None
    """Name of vLLM's reasoning parser; null: none, or our own if `tool_parser` is null too."""
    keep_output: Annotated[int, Field(ge=0)] = 1000
    """Most commands whose output is kept, in `logs/agents` of the run folder."""


class RolloutConfig(Section):
    """How episodes are made."""

    generator: Literal["environment", "agent"] = "environment"
    """`environment`: the environment's own turns; `agent`: an agent plays the tasks through a gateway."""
    agent: AgentConfig | None = None

    groups_per_batch: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 8  # the advantage of a single sample is always 0
    max_tokens: Positive = 64
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    concurrency: Positive = 1024
    """Most samples in flight."""
    max_turns: Positive = 8
    """Most responses in an episode of an agent, or of an environment with `step`; `max_tokens` limits each one."""
    max_episode_tokens: Positive = 4096
    """Most tokens of such an episode after its prompt; for an agent, only sampled tokens count."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, top_p: float) -> float:
        if top_p < 1:
            raise ValueError(
                f"{top_p} cannot be trained on: engines then give logprobs over the kept tokens alone and the learner "
                "over the whole vocabulary, so importance weights would be wrong; leave it at 1"
            )
        return top_p

    @model_validator(mode="after")
    def _has_its_agent(self) -> Self:
        if (self.generator == "agent") != (self.agent is not None):
            raise ValueError("rollout.agent and rollout.generator: agent belong together; give both")
        return self


class LoraConfig(Section):
    """One low-rank adapter, trained instead of the weights."""

    name: Name = "policy"
    """Adapter name at the engines."""
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapter's product is scaled by alpha / rank; default: by 1."""
    train_attn: bool = True
    train_mlp: bool = True
    """It must be false for a mixture of experts."""
    train_unembed: bool = False
    merge: bool = False
    """Send engines all weights, merged, and no adapter."""


class TrainConfig(Section):
    """The learner and its schedule."""

    model: str | None = None
    """Floating-point checkpoint of the learner, for engines that serve a quantised one; default: `engine.model`."""
    steps: Positive = 80
    schedule: Literal["async", "one_step_off", "sync", "colocated"] = "async"
    """`colocated`: learner and engines share GPUs in turn; see `penstock.train.schedules` for each."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    adam_betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(gt=0)] = 1.0
    loss: Annotated[str, AfterValidator(_loss_name)] = "dapo"
    """One of `LOSSES`, or `module:function` of your own (docs/how-to/losses.md)."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    correction: Literal["tis", "mis", "icepop", "dppo", "sequence_mask", "none"] = "tis"
    """Correction for tokens of older weights; see `penstock.train.losses`. `none` needs a schedule without such
    tokens."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL divergence from the run's first model, added to the loss. Without `lora`, it needs a second
    copy of the model."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the policy's entropy, subtracted from the loss."""
    importance_cap: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Upper bound of the trainer/engine importance weight, in the KL part and under every correction but `none`."""
    ratio_band: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(ge=1)]] = (0.5, 5.0)
    """`mis` and `icepop`: smallest and largest importance weight kept."""
    probability_gap: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`dppo`: difference of probabilities above which a token is dropped."""
    sequence_gap: Annotated[float, Field(gt=0)] = 0.2
    """`sequence_mask`: mean logprob gap, in nats, above which a sequence of negative advantage is dropped."""
    advantage: Literal["group_norm", "group_mean", "leave_one_out"] = "group_norm"
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """`async`: largest difference of the trainer's version and a token's version when the token is trained on."""
    kv: KV = "keep_in_flight"
    """KV cache of requests in flight when weights change; see `Fleet.update_weights`."""
    micro_batch_tokens: Positive | None = None
    """Tokens in one forward and backward pass; default: 16,384 on CUDA, 2,048 on CPUs."""
    checkpoint_every: Positive = 20
    ranks: Positive = 1
    """Processes that share the model (FSDP2), each with its own GPU, or on CPUs."""
    ray_address: Annotated[str, Field(min_length=1)] | None = None
    """Ray cluster, as for `ray.init`, on which all ranks but the first are actors; default: processes here."""
    threads: Positive | None = None
    """Torch threads of the learner; default: torch's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of matrix products; weights and optimiser are in fp32. `auto`: bfloat16 on CUDA, else float32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Part of each layer that the backward pass recomputes to save memory: nothing, all but attention, or all."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in the host's memory."""
    lora: LoraConfig | None = None
    """Train one adapter; default: all weights."""
    compile: bool = False
    """Compile each decoder layer, which takes minutes at the first step and is faster afterwards."""

    logprob_alarm: Annotated[float, Field(gt=0)] = 0.1
    """Mean |trainer logprob - engine logprob| over tokens of equal weights, in nats, above which a step warns."""

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
    def _has_ranks_for_ray(self) -> Self:
        if self.ray_address is not None and self.ranks == 1:
            raise ValueError("ray_address is for ranks beside the first: ask for more ranks, or set it to null")
        return self

    @model_validator(mode="after")
    def _offloadable(self) -> Self:
        # Otherwise the saved tensors include the layers' weights, which would be copied with each layer.
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
    """Steps between evaluations during the run; 0: none."""


class RunConfig(Section):
    """A whole training run, as `penstock train` reads it."""

    name: Name = "run"
    """Name of the run and of its folder, so it is no path."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
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
    def _has_verifiers_play(self) -> Self:
        if self.environment.name.startswith("verifiers:") and self.rollout.generator != "agent":
            raise ValueError(
                "verifiers itself plays the tasks of environment.name: verifiers:ID: set rollout.generator: agent and "
                "rollout.agent.callable: penstock.gateway.verifiers:play"
            )
        return self

    @property
    def learner_model(self) -> str:
        """Path or hub name of the checkpoint that the learner starts from."""
        return self.train.model or self.engine.model

    @property
    def engines_may_differ(self) -> bool:
        """Whether engines may have loaded other weights than the learner starts from."""
        return self.learner_model != self.engine.model or bool(self.fleet.attach)

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
        """Return why a learner of `count` ranks cannot run this; None: it can."""
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


def read_yaml(text: str) -> object:
    """Read a YAML text. ConfigError: a key occurs twice; yaml.YAMLError: not YAML."""
    return yaml.load(text, Loader=_Once)  # noqa: S506 - it is a safe loader


class _Once(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here the mapping is as written. Later, it holds the keys of a merge before the keys that override them.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise ConfigError(f"config line {key.start_mark.line + 1}: {key.value!r} is given twice; take one out")
            seen.add((key.tag, key.value))
        return node


def load_config(path: Path | str | None, overrides: Sequence[str] = (), *, offered: Collection[str] = ()) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides, and validate the whole.

    The values of overrides are YAML. ConfigError: one line that names the key, with a hint as `validate` gives it.
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
            found = "is empty" if loaded is None else f"holds a {type(loaded).__name__}"
            raise ConfigError(f"{file} {found}; it must hold sections with keys, such as `train: {{steps: 80}}`")
        tree = cast("dict[str, Any]", loaded)
    for override in overrides:
        apply_override(tree, override)
    return validate(RunConfig, tree, offered)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in a tree. ConfigError: another form."""
    key, value = read_override(override)
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child: Any = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a section")
        node = cast("dict[str, Any]", child)
    node[last] = value


def read_override(override: str) -> tuple[str, Any]:
    """Return the key and the value, which is YAML, of a `section.key=value`. ConfigError: another form."""
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"{override!r} is not of the form KEY=VALUE")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error


def read_keys(file: Path, option: str) -> dict[str, Any]:
    """Read a YAML file that maps tenants' names to their keys and limits. `option` names the file in messages.

    Raises:
        ConfigError: it cannot be read, other users can read it, or it is empty.
    """
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"{option} {file} can be read by other users of this machine; chmod 600 it")
        given = read_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict) or not given:
        raise ConfigError(f"{option} {file} holds no tenants; it has lines such as `alice: {{key: KEY}}`")
    return {str(name): values for name, values in cast("dict[object, Any]", given).items()}


HUB_S = 10.0
"""Deadline of one short question to the Hugging Face hub; its own libraries retry for a minute."""


def check_on_hub(name: str, kind: Literal["model", "dataset"], file: str = "config.json", *others: str) -> None:
    """Refuse a name, such as Qwen/Qwen3-0.6B, that is neither in this machine's cache nor on the hub.

    The cache holds `file`, or one of the `others`, if the repository was downloaded.

    Raises:
        UserError: the reason, and what to do.
    """
    # huggingface_hub ships partial types.
    from huggingface_hub import (  # noqa: PLC0415
        get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of httpx or of httpx2, as the hub's version has it
    )

    try:
        known = (try_to_load_from_cache(name, one, repo_type=kind) for one in (file, *others))
        if all(found is None for found in known):  # the cache also knows which files a name lacks
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=HUB_S)
    except EntryNotFoundError:  # the repository exists
        return
    except (HFValidationError, HTTPError, OSError) as error:  # errors of an answer included
        why = str(error).strip().partition("\n")[0]
        raise UserError(
            f"no {kind} {name!r}: there is no such folder, and the Hugging Face hub gives none ({why}); check the "
            "name, set HF_TOKEN, or give the path of a folder"
        ) from error
