"""Engines that compute in int8 or fp8: which there are, and what refuses them before a launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from penstock.engine.layouts import ModelShape
from penstock.errors import ConfigError
from penstock.plugin import QUANTISING_LOADER
from penstock.settings import EngineConfig

OF_FLOATS = ("int8", "fp8")
"""Values of `engine.quantization` for which Penstock quantises the checkpoint and every update, a scale for each row.
Others are vLLM's own, under its names."""


def quantization_config(name: str | None, *, on_cpu: bool) -> dict[str, Any]:
    """Return what a checkpoint's config.json would hold, in the format of compressed-tensors."""
    kind = "int" if name == "int8" else "float"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    # vLLM's symmetric int8 kernel for CPUs with AMX takes no fp32 activations; the other one does, on any CPU.
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


def is_quantised(model: str) -> bool:
    """Whether a checkpoint folder holds quantised weights. A hub name says nothing here."""
    path = Path(model).expanduser() / "config.json"
    return path.is_file() and json.loads(path.read_bytes()).get("quantization_config") is not None


def options_of(config: EngineConfig, device: Literal["cpu", "gpu"], shape: ModelShape | None) -> dict[str, Any]:
    """Return vLLM's options for `engine.quantization`, with `quantization_config` for the model's own config.

    Raises:
        ConfigError: the model or the device cannot do that; with the reason, and what to choose.
    """
    name, own = config.quantization, config.quantization in OF_FLOATS
    problem = f"engine.quantization: {name!r} cannot be had"
    if own and is_quantised(config.model):
        raise ConfigError(f"{problem}: the weights in {config.model} are quantised already; leave the key out")
    if own and device == "cpu" and shape is not None and shape.experts:
        raise ConfigError(f"{problem} for a mixture of experts on CPUs; vLLM has that on GPUs alone")
    if own and config.load_format not in {"auto", "safetensors"}:
        raise ConfigError(f"{problem} with load_format {config.load_format!r}; it reads safetensors")
    if not own and device == "cpu" and not is_quantised(config.model):
        raise ConfigError(f"{problem} on CPUs, where vLLM quantises no floats by itself; choose int8 or fp8")
    if not own:
        return {"quantization": name}
    return {
        "load-format": QUANTISING_LOADER,
        "quantization_config": quantization_config(name, on_cpu=device == "cpu"),
    }
