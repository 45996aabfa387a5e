"""Loads a transformers language model: whole, or module by module for ranks.

Arithmetic decides whether the model fits the learner's memory, before anything is loaded.
"""

# transformers and safetensors ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as hf_logging
from transformers.utils.hub import cached_file

from penstock.config import TrainConfig
from penstock.errors import ConfigError

_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Safetensors dtypes that weights can be cast to. For others (quantized weights), the config's dtype applies."""
GIB = 1 << 30
_ABSENT_IS_NONE: dict[str, Any] = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def load_whole(model_path: str, dtype: torch.dtype) -> Any:
    """Load all weights into this process. ConfigError: they cannot be read."""
    with _refusing(model_path):
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)


def without_weights(model_path: str, dtype: torch.dtype) -> Any:
    """Build a model whose parameters have shapes but no values. Its buffers have values."""
    with _refusing(model_path), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(model_path)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def checkpoint_files(model_path: str) -> list[str]:
    """Return a checkpoint's safetensors files, from a folder or the hub; an empty list for other formats."""
    if single := cached_file(model_path, SAFE_WEIGHTS_NAME, **_ABSENT_IS_NONE):
        return [single]
    if (index := cached_file(model_path, SAFE_WEIGHTS_INDEX_NAME, **_ABSENT_IS_NONE)) is None:
        return []
    names: set[str] = set(json.loads(Path(index).read_text())["weight_map"].values())
    return [str(cached_file(model_path, name)) for name in sorted(names)]


def stored_dtypes(model_path: str) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of a checkpoint; an empty dict for formats other than safetensors."""
    dtypes: dict[str, torch.dtype] = {}
    for file in checkpoint_files(model_path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                stored = tensors.get_slice(name).get_dtype()
                if stored in _STORED:
                    dtypes[name] = _STORED[stored]
    return dtypes


class ModuleLoader:
    """Loads the weights of a model from `without_weights` module by module, so a rank holds only one whole.

    The checkpoint's files are mapped, so bytes that are not copied take no memory of this process.
    """

    def __init__(self, model: Any, model_path: str, files: Sequence[str]) -> None:
        self._model, self._path = model, model_path
        self._names = {module: f"{name}." if name else "" for name, module in model.named_modules()}
        self._mapping: Any = get_model_conversion_mapping(model)
        self._left: dict[str, dict[str, Any]] = {}
        """By a tensor's name in the model: its parts, by their checkpoint names."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        state = model.state_dict()
        with _refusing(model_path):
            for file in files:
                opened: Any = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    found, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
                    target = name if found not in state and name in state else found
                    self._left.setdefault(target, {})[name] = opened.get_slice(name)

    def load(self, module: nn.Module) -> None:
        """Fill a module. For the model itself: fill everything that is left.

        Raises:
            ConfigError: a tensor is missing, has another shape, or cannot be read.
        """
        prefix = self._names[module]
        targets = [target for target in self._left if target.startswith(prefix)]
        parts = {name: part for target in targets for name, part in self._left.pop(target).items()}
        with _refusing(self._path):
            options = LoadStateDictConfig(dtype=self._model.dtype, weight_mapping=self._mapping)
            info, _ = convert_and_load_state_dict_in_model(self._model, parts, options)
        if module is self._model:
            self._model.tie_weights(missing_keys=_empty(module))
        wrong = [prefix + name for name in sorted(_empty(module))]
        if wrong := [*wrong, *map(str, info.mismatched_keys), *info.conversion_errors]:
            raise ConfigError(
                f"cannot load model {self._path!r} for training: its checkpoint lacks {wrong[0]}, or has it in another "
                f"shape ({len(wrong)} tensors in all)"
            )


def _empty(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.is_meta}


@contextmanager
def _refusing(model_path: str) -> Generator[None]:
    hf_logging.disable_progress_bar()  # a bar would overwrite the live display
    try:
        yield
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"cannot load model {model_path!r} for training: {error}") from error


def check_fits(
    model_path: str, config: TrainConfig, device: torch.device, *, frozen_bytes: int = 4, ranks: int = 1
) -> None:
    """Refuse a model whose weights, gradients and optimiser exceed the free memory.

    Activations are not counted. A model that passes may still be too large. With `config.lora`, the base needs no
    gradients and no optimiser, and each of its parameters takes `frozen_bytes`. On CPUs, the host's memory is checked.
    `ranks` share everything evenly, each with its own device.

    Raises:
        ConfigError: it does not fit (the message has the sum and the free memory), or its config is unreadable.
    """
    count = parameter_count(model_path)
    free = _free_bytes(device)
    if free is None:
        return
    needs = {"weights": 4, "gradients": 4, "AdamW": 8}  # bytes per parameter, all in fp32, AdamW with two moments
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
    """Count a model's parameters from its config, without loading it. ConfigError: the config is unreadable."""
    model = without_weights(model_path, torch.float32)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of memory, or None if unknown."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # PyTorch caches memory that an earlier learner of this process released
        return torch.cuda.mem_get_info(device)[0]
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return 1024 * int(found[1]) if found else None
