"""Whether a learner fits its memory, by arithmetic and before anything is loaded."""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config import TrainConfig
from penstock.errors import ConfigError

GIB = 1 << 30
MASTER_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8
"""Of each trained parameter: all in fp32, AdamW with two moments."""


def check_fits(
    model_path: str, config: TrainConfig, device: torch.device, *, frozen_bytes: int = 4, ranks: int = 1
) -> None:
    """Refuse a model whose weights, gradients and optimiser are more than the memory that is free.

    Activations come on top and are not counted: what passes may still be too large.

    Args:
        model_path: folder or hub name.
        config: `lora` leaves a base without gradients and optimiser.
        device: of the learner; on CPUs the host's memory is looked at.
        frozen_bytes: of each parameter that is not trained itself.
        ranks: that share everything evenly, each with a device of its own.

    Raises:
        ConfigError: with the sum and what is free; or the model's config cannot be read.
    """
    count = parameter_count(model_path)
    free = _free_bytes(device)
    if free is None:
        return
    needs = {"weights": MASTER_BYTES, "gradients": GRADIENT_BYTES, "AdamW": ADAM_BYTES}
    if config.lora is not None:
        needs = {"frozen weights": frozen_bytes}
    total = sum(needs.values()) * count / ranks
    if total <= free:
        return
    listed = " + ".join(f"{name} {count * size / ranks / GIB:.1f}" for name, size in needs.items())
    share = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise ConfigError(
        f"{model_path!r} has {count / 1e9:.2f}e9 parameters and cannot be trained in {free / GIB:.1f} GiB of free "
        f"{device.type.upper()} memory: {listed} = {total / GIB:.1f} GiB{share}; train an adapter (train.lora) or a "
        "smaller model, or free memory"
    )


def parameter_count(model_path: str) -> int:
    """Count a model's parameters from its config; nothing is loaded. ConfigError: there is none that can be read."""
    try:
        config: Any = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load model {model_path!r} for training: {error}") from error
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _free_bytes(device: torch.device) -> int | None:
    """Memory that is free now; None where nothing says so."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return 1024 * int(found[1]) if found else None
