"""The tensors that an update must bring, and their dtypes, from a model's checkpoint or config."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import WeightsError
from penstock.rooms import plugged_in
from penstock.weights.disk import SAFETENSORS
from penstock.weights.manifest import TIED_HEAD, WeightSpec
from penstock.weights.pack import dtype_name

FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""Allowed dtypes of a matrix that is quantised on its way."""
Entry = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a checkpoint's tensor."""


def expected_weights(model_config: Any) -> WeightSpec:
    """Return a ModelConfig's spec, from checkpoint headers or (dummy weights) config."""
    engine_dtype = dtype_name(model_config.dtype)
    entries = _entries(model_config)
    schemes = schemes_of(model_config, entries)
    scales = {scheme.name_of_scale(name) for name, scheme in schemes.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, frozenset[str]] = {}
    for name, dtype, shape in entries:
        if name not in scales:
            shapes[name] = shape
            dtypes[name] = FLOATS if name in schemes else frozenset({dtype, engine_dtype})
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    return WeightSpec(shapes, dtypes, frozenset({TIED_HEAD}) if tied else frozenset())


def schemes_of(model_config: Any, entries: list[Entry] | None = None) -> dict[str, Any]:
    """Return a ModelConfig's quantisation per matrix name. WeightsError: no update can quantise in this way."""
    config = getattr(model_config.hf_config, "quantization_config", None)
    return {} if config is None else plugged_in("quantise.schemes")(config, entries or _entries(model_config))


def _entries(model_config: Any) -> list[Entry]:
    if found := _checkpoint_tensors(Path(model_config.model)):
        return found
    dtype, blank = dtype_name(model_config.dtype), plugged_in("checkpoint.tensors")(model_config.hf_config)
    return [(name, dtype, tuple(tensor.shape)) for name, tensor in blank.items()]


def _checkpoint_tensors(folder: Path) -> list[Entry]:
    from safetensors import safe_open  # noqa: PLC0415 - part of vLLM's environment

    found: list[Entry] = []
    known = {theirs: ours for ours, theirs in SAFETENSORS.items()}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                if (dtype := part.get_dtype()) not in known:
                    raise WeightsError(f"tensor {name!r} of {file} has the dtype {dtype}, which no update can bring")
                found.append((name, known[dtype], tuple(part.get_shape())))
    return found
