"""Which layouts of ranks vLLM can run a model in; what it cannot is refused here, before an engine is launched.

vLLM says most of this itself, but half a minute into a start and from one of many processes; and some layouts it
starts and then dies of. The rules are those of vLLM 0.26 to 0.32; what they need of a model is in its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.parsing import parse_json

Device = Literal["cpu", "gpu"]

RANK_BYTES = 256 * 2**20
"""Less than any rank needs on the CPU: with a model of 3 MiB its process has 490 MiB of its own (vLLM 0.32)."""

OURS: Mapping[str, str] = {
    "model": "set model",
    "host": "an engine listens where its launcher finds it",
    "port": "an engine listens where its launcher finds it; router.port is for clients",
    "middleware": "Penstock's own is there, without which it cannot update an engine",
    "worker-extension-cls": "Penstock's own is there, without which it cannot update an engine",
}
"""Options of a server, the simulated one's too, that `extra_args` must not pass by, with what to do instead."""

NOT_EXTRA: Mapping[str, str] = {
    **OURS,
    "tensor-parallel-size": "set tensor_parallel_size, by which GPUs are counted",
    "pipeline-parallel-size": "set pipeline_parallel_size, by which GPUs are counted",
    "data-parallel-size": "set data_parallel_size, by which GPUs are counted",
    "prefill-context-parallel-size": "an engine's ranks are TP x PP x DP here, and its weights are sent to those",
    "enable-expert-parallel": "set enable_expert_parallel, which is checked against the model",
    "api-server-count": "versions are kept in one API process of an engine; for more of them start more engines",
    "enable-sleep-mode": "set enable_sleep_mode, which is checked against the device",
}
"""The same of vLLM's."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's config.json decides how it can be split; None: it does not say so, and nothing is refused."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    """None also where keys and values are latent (MLA): each rank has them whole."""
    width: int | None = None
    """Inner size of the dense feed-forward layers; None for a mixture of experts."""
    experts: int = 0
    """Routed experts of a layer; 0: the model is dense."""
    expert_width: int | None = None
    """Inner size of one expert."""
    vocabulary: int | None = None
    """Rows of the embedding."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed config.json; that of a multimodal model is about its language model."""
        text: Any = config.get("text_config")
        given: Mapping[str, Any] = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else config
        heads = _first(given, "num_attention_heads", "n_head", "n_heads")
        kv_heads = _first(given, "num_key_value_heads", "num_kv_heads") or heads
        experts = _first(given, "num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts") or 0
        width = _first(given, "intermediate_size", "n_inner", "ffn_dim")
        return cls(
            layers=_first(given, "num_hidden_layers", "n_layer", "n_layers"),
            heads=heads,
            kv_heads=None if given.get("kv_lora_rank") is not None else kv_heads,
            width=None if experts else width,
            experts=experts,
            expert_width=(_first(given, "moe_intermediate_size") or width) if experts else None,
            vocabulary=_first(given, "vocab_size"),
        )


def read_shape(model: str) -> ModelShape | None:
    """The shape of a checkpoint folder's model; None for a hub name, which is resolved by vLLM.

    Raises:
        ConfigError: its config.json is not JSON, or no object.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return None
    config: Any = parse_json(path.read_bytes(), f"the checkpoint's {path}", ConfigError, loads=json.loads)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, not {type(config).__name__}; is the checkpoint whole?")
    return ModelShape.of(cast("Mapping[str, Any]", config))


def machine_bytes() -> int | None:
    """Memory of this machine and its swap; None where it does not say so."""
    try:
        told = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    kib = sum(map(int, re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB$", told, re.MULTILINE)))
    return 1024 * kib or None


def check_extra_args(config: EngineConfig, refused: Mapping[str, str]) -> None:
    """Raise ConfigError for an option of `refused`, with what that says to do instead."""
    for name in config.extra_args:
        option = name.removeprefix("--").replace("_", "-")
        if option in refused:
            raise ConfigError(f"extra_args: {option!r} cannot be passed by: {refused[option]}")


def check_layout(config: EngineConfig, device: Device, shape: ModelShape | None) -> None:
    """Refuse what cannot run.

    Args:
        config: of the engine.
        device: what it is to run on.
        shape: of its model; None where that is not known yet: then only what holds for every model is checked.

    Raises:
        ConfigError: with the reason, the numbers, and what to change.
    """
    check_extra_args(config, NOT_EXTRA)
    moe = shape is not None and shape.experts > 0
    reasons = list(_not_on_cpu(config, moe=moe)) if device == "cpu" else []
    reasons += _not_of_model(config, shape) if shape is not None else ()
    if reasons:
        tp, pp, dp = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
        expert = ", expert parallel" if config.enable_expert_parallel else ""
        raise ConfigError(
            f"model {config.model} cannot be served with TP {tp}, PP {pp}, DP {dp}{expert}: {'; '.join(reasons)}"
        )


def _not_on_cpu(config: EngineConfig, *, moe: bool) -> Iterator[str]:
    """What vLLM's CPU build cannot do (seen with 0.32)."""
    if config.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size is {config.pipeline_parallel_size}, and with more than one stage vLLM's CPU build "
            "dies of the first request; use tensor or data parallelism there"
        )
    if config.enable_expert_parallel and _expert_ranks(config) > 1:
        yield (
            f"its experts would be spread over {_expert_ranks(config)} ranks, and vLLM's CPU build dies of that; leave "
            "enable_expert_parallel off there"
        )
    elif moe and config.data_parallel_size > 1:
        yield (
            f"it has experts, which the {config.data_parallel_size} data-parallel replicas would share, and vLLM's CPU "
            "build dies of the first request; launch more engines there"
        )
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    there = machine_bytes()
    if there is not None and ranks * RANK_BYTES > there:
        yield (
            f"its {ranks} ranks (TP x PP x DP) are processes that need {ranks * RANK_BYTES / 2**30:.1f} GiB of memory "
            f"before any weights, and this machine has {there / 2**30:.1f} GiB with its swap; ask for fewer"
        )
    if config.enable_sleep_mode:
        yield "enable_sleep_mode is set, and vLLM's CPU build answers that it sleeps but frees no memory"


def _not_of_model(config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    if shape.heads and shape.heads % tp:
        yield f"its {shape.heads} attention heads cannot be split evenly over tensor_parallel_size {tp}"
    elif shape.kv_heads and shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"its {shape.kv_heads} key-value heads can be neither split nor copied evenly to {tp} ranks"
    if shape.width and shape.width % tp:
        yield f"its feed-forward width of {shape.width} cannot be split evenly over tensor_parallel_size {tp}"
    if shape.layers and shape.layers < pp:
        yield f"its {shape.layers} layers are fewer than pipeline_parallel_size {pp}: a stage would have none"
    if config.enable_expert_parallel and not shape.experts:
        yield "enable_expert_parallel is set, and it has no experts: its config.json names none"
    if shape.experts:
        yield from _not_of_experts(config, shape)


def _not_of_experts(config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    ranks = _expert_ranks(config)
    if config.enable_expert_parallel:
        if shape.experts < ranks:
            yield f"its {shape.experts} experts are fewer than the {ranks} ranks (TP x DP) that are to share them"
    elif shape.expert_width and shape.expert_width % ranks:
        yield (
            f"each expert's width of {shape.expert_width} cannot be split evenly over {ranks} ranks (TP x DP); "
            "enable_expert_parallel spreads whole experts"
        )


def _expert_ranks(config: EngineConfig) -> int:
    """Over how many ranks vLLM spreads the experts of a layer: data-parallel replicas share them too."""
    return config.tensor_parallel_size * config.data_parallel_size


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is a positive whole number; models whose layers differ have lists, which say nothing."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
