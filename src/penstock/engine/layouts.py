"""Refuses configurations that would kill an engine, before its launch: ranks on CPUs, experts, int8 or fp8.

vLLM itself refuses others, such as heads that cannot be split over ranks. The rules hold for vLLM 0.26 to 0.32. They
read the model's properties from its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from penstock.checks import parse_json
from penstock.errors import ConfigError
from penstock.plugin import QUANTISING_LOADER
from penstock.settings import EngineConfig

RANK_BYTES = 256 * 2**20
"""Lower bound of a CPU rank's memory. With a model of 3 MiB, its process has 490 MiB of its own (vLLM 0.32)."""

OF_FLOATS = ("int8", "fp8")
"""Values of `engine.quantization` for which Penstock quantises the checkpoint and every update, with one scale per row.
Other values are vLLM's own, under its names."""

_LAUNCHERS = "an engine listens where its launcher finds it"
_PLUGINS = "Penstock's own is there, without which it cannot update an engine"
OURS: Mapping[str, str] = {
    "model": "set model",
    "host": _LAUNCHERS,
    "port": f"{_LAUNCHERS}; router.port is for clients",
    "middleware": _PLUGINS,
    "worker-extension-cls": _PLUGINS,
}
"""Server options, also of the simulated engine, that `extra_args` must not set, each with a remedy."""

NOT_EXTRA: Mapping[str, str] = {
    **OURS,
    **{f"{kind}-parallel-size": f"set {kind}_parallel_size, by which GPUs are counted"
       for kind in ("tensor", "pipeline", "data")},
    "prefill-context-parallel-size": "an engine's ranks are TP x PP x DP here, and its weights are sent to those",
    "enable-expert-parallel": "set enable_expert_parallel, which is checked against the model",
    "api-server-count": "versions are kept in one API process of an engine; for more of them start more engines",
    "enable-return-routed-experts": "set enable_return_routed_experts, which is checked against the model",
    "logprobs-mode": "a learner needs the logprobs of what was sampled from",
    "enable-sleep-mode": "set enable_sleep_mode, which is checked against the device",
}  # fmt: skip
"""Options that `extra_args` must not set for vLLM, each with a remedy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Properties of a model from its config.json. An unknown property (None) refuses nothing."""

    experts: int | None = None
    """Number of routed experts per layer."""
    vocabulary: int | None = None
    quantised: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a parsed config.json; for a multimodal model, its language part."""
        text: Any = config.get("text_config")
        given: Mapping[str, Any] = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else config
        names = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
        experts = next((given[name] for name in names if given.get(name)), 0)
        quantised = config.get("quantization_config") is not None
        return cls(experts=experts, vocabulary=given.get("vocab_size"), quantised=quantised)


def read_shape(model: str) -> ModelShape:
    """Read the shape of a checkpoint folder's model. For a hub name, nothing is known.

    Raises:
        ConfigError: its config.json is not JSON, or not an object.
    """
    path = Path(model).expanduser() / "config.json"
    if not path.is_file():
        return ModelShape()
    config: Any = parse_json(path.read_bytes(), f"the checkpoint's {path}", ConfigError, loads=json.loads)
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold an object, not {type(config).__name__}; is the checkpoint whole?")
    return ModelShape.of(cast("Mapping[str, Any]", config))


def machine_bytes() -> int:
    """Return the bytes of this machine's memory and swap."""
    sizes = re.findall(r"^(?:MemTotal|SwapTotal):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return 1024 * sum(map(int, sizes))


def simulated_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of a simulated engine that replaces one of vLLM."""
    _check_extra_args(config, OURS)
    return {
        # A trainer with the model looks up the embeddings of the simulated tokens.
        "vocab-size": read_shape(config.model).vocabulary,
        "max-model-len": config.max_model_len,
        "max-num-seqs": config.max_num_seqs,
        "served-model-name": config.served_model_name or config.model,
        "seed": config.seed,
        **config.extra_args,
    }


def check(config: EngineConfig, device: Literal["cpu", "gpu"], shape: ModelShape | None = None) -> ModelShape:
    """Return a model's shape after all checks. For a hub name, few rules apply.

    Raises:
        ConfigError: the engine cannot run on `device`. The message has every reason, the numbers, and remedies.
    """
    _check_extra_args(config, NOT_EXTRA)
    shape = read_shape(config.model) if shape is None else shape
    tp, pp, dp = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    if reasons := [reason for refused, reason in _rules(config, device == "cpu", shape) if refused]:
        expert = ", expert parallel" if config.enable_expert_parallel else ""
        raise ConfigError(
            f"model {config.model} cannot be served with TP {tp}, PP {pp}, DP {dp}{expert}: {'; '.join(reasons)}"
        )
    return shape


def _check_extra_args(config: EngineConfig, refused: Mapping[str, str]) -> None:
    for name in config.extra_args:
        option = name.removeprefix("--").replace("_", "-")
        if option in refused:
            raise ConfigError(f"extra_args: {option!r} cannot be passed by: {refused[option]}")


def _rules(config: EngineConfig, cpu: bool, m: ModelShape) -> tuple[tuple[object, str], ...]:  # noqa: FBT001
    """Return whether each rule is broken, and its message.

    The first rules are of vLLM's CPU build (seen with 0.32). Experts are spread over data-parallel replicas too.
    """
    tp, pp, dp = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    ep, spread, dies = config.enable_expert_parallel, tp * dp, "vLLM's CPU build dies of"
    needed, memory, replay = tp * pp * dp * RANK_BYTES, machine_bytes(), config.enable_return_routed_experts
    return (
        (cpu and pp > 1,
         (f"pipeline_parallel_size is {pp}, and with more than one stage {dies} the first request; use tensor or data "
          "parallelism there")),
        (cpu and ep and spread > 1,
         (f"its experts would be spread over {spread} ranks, and {dies} that; leave enable_expert_parallel off there")),
        (cpu and dp > 1 and not ep and m.experts,
         (f"it has experts, which the {dp} data-parallel replicas would share, and {dies} the first request; launch "
          "more engines there")),
        (cpu and needed > memory,
         (f"its {tp * pp * dp} ranks (TP x PP x DP) are processes that need {needed / 2**30:.1f} GiB of memory before "
          f"any weights, and this machine has {memory / 2**30:.1f} GiB with its swap; ask for fewer")),
        (cpu and config.enable_sleep_mode,
         "enable_sleep_mode is set, and vLLM's CPU build answers that it sleeps but frees no memory"),
        (replay and cpu,
         ("enable_return_routed_experts is set, and vLLM reports experts by its second model runner alone, which needs "
          "Triton and so a GPU")),
        (replay and m.experts == 0, "enable_return_routed_experts is set, and it has no experts"),
        (replay and pp > 1, f"pipeline_parallel_size is {pp}, and vLLM reports no experts of several stages"),
        (replay and not config.enable_prefix_caching,
         "vLLM reports experts with prefix caching alone; set enable_prefix_caching"),
    )  # fmt: skip


# --- int8 and fp8 ----------------------------------------------------------------------------------------------------


def quantised_options(config: EngineConfig, device: Literal["cpu", "gpu"], shape: ModelShape) -> dict[str, Any]:
    """Return vLLM's options and `quantization_config` for `engine.quantization`.

    Raises:
        ConfigError: the model or the device does not support it. The message has the reason and a remedy.
    """
    name, own, cpu = config.quantization, config.quantization in OF_FLOATS, device == "cpu"
    unread = config.load_format not in {"auto", "safetensors"}
    for refused, why in (
        (own and shape.quantised, f": the weights in {config.model} are quantised already; leave the key out"),
        (own and cpu and shape.experts, " for a mixture of experts on CPUs; vLLM has that on GPUs alone"),
        (own and not cpu and config.dtype == "float32",
         " in float32 on GPUs, whose kernels give half precision; set engine.dtype: bfloat16"),
        (own and unread, f" with load_format {config.load_format!r}; it reads safetensors"),
        (not own and cpu and not shape.quantised,
         " on CPUs, where vLLM quantises no floats by itself; choose int8"),
    ):  # fmt: skip
        if refused:
            raise ConfigError(f"engine.quantization: {name!r} cannot be had{why}")
    if not own:
        return {"quantization": name}
    return {"load-format": QUANTISING_LOADER, "quantization_config": quantization_config(name, on_cpu=cpu)}


def quantization_config(name: str | None, *, on_cpu: bool) -> dict[str, Any]:
    """Return a checkpoint's `quantization_config` in the format of compressed-tensors."""
    kind = "int" if name == "int8" else "float"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    # vLLM's symmetric int8 kernel for CPUs with AMX rejects fp32 activations. The other kernel runs on any CPU.
    shifted = on_cpu and kind == "int"
    activations = {**weights, "strategy": "token", "symmetric": not shifted, "dynamic": True}
    group = {"targets": [r"re:.*_proj$"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
