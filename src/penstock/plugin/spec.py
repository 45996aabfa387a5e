"""Requirements for weights: the tensors of an update and their dtypes, and the checksum of the weights in force."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from penstock.errors import WeightsError
from penstock.rooms import plugged_in
from penstock.weights.checksum import device_sums
from penstock.weights.manifest import SAFETENSORS, SUMS, TIED_HEAD, WeightManifest, WeightSpec
from penstock.weights.pack import dtype_name

FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""Allowed dtypes of a matrix that is quantised on its way."""
Entry = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a checkpoint's tensor."""


def expected_weights(model_config: Any) -> WeightSpec:
    """Return a ModelConfig's spec, from checkpoint headers or (dummy weights) config."""
    engine_dtype = dtype_name(model_config.dtype)
    entries = _entries(model_config)
    schemes = _schemes(model_config, entries)
    scales = {scheme.name_of_scale(name) for name, scheme in schemes.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, frozenset[str]] = {}
    for name, dtype, shape in entries:
        if name not in scales:
            shapes[name] = shape
            dtypes[name] = FLOATS if name in schemes else frozenset({dtype, engine_dtype})
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    return WeightSpec(shapes, dtypes, frozenset({TIED_HEAD}) if tied else frozenset())


def schemes_of(model_config: Any) -> dict[str, Any]:
    """Return a ModelConfig's quantisation per matrix name. WeightsError: no update can quantise in this way."""
    return _schemes(model_config, _entries(model_config))


def _schemes(model_config: Any, entries: list[Entry]) -> dict[str, Any]:
    config = getattr(model_config.hf_config, "quantization_config", None)
    return {} if config is None else plugged_in("quantise.schemes")(config, entries)


def _entries(model_config: Any) -> list[Entry]:
    return _checkpoint_tensors(Path(model_config.model)) or _config_tensors(model_config)


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


def _config_tensors(model_config: Any) -> list[Entry]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow to import, needed once

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config.hf_config)
    dtype = dtype_name(model_config.dtype)
    return [(name, dtype, tuple(tensor.shape)) for name, tensor in plugged_in("checkpoint.tensors")(model).items()]


# --- The checksum of the weights in force ----------------------------------------------------------------------------


def checksum_of_sums(manifest: WeightManifest) -> str:
    """Return the checksum of a version whose tensors all match the sender's: equal for any layout."""
    sums = repr([(entry.name, entry.checksum) for entry in manifest.tensors])
    return SUMS + hashlib.blake2b(sums.encode(), digest_size=16).hexdigest()


def weights_checksum(model: torch.nn.Module) -> str:
    """Return the checksum of the weights in force: equal for workers of one layout with the same weights.

    It is a digest of the parameters' names, shapes and dtypes, a colon, and a digest of their sums
    (`weights/checksum.py`). CPU kernels hide packed weights, so their output for a fixed input counts (`_hidden`).
    """
    kind, digest = hashlib.blake2b(digest_size=4), hashlib.blake2b(digest_size=16)
    parameters: list[torch.Tensor] = []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            if parameter.numel():
                parameters.append(parameter)
        digest.update(repr(device_sums(parameters)).encode())
        for name, module in model.named_modules():
            if (found := _hidden(module)) is not None:
                digest.update(name.encode())
                digest.update(found.float().numpy().tobytes())
    return f"{kind.hexdigest()}:{digest.hexdigest()}"


def _hidden(layer: Any) -> torch.Tensor | None:
    """Return a layer's output for a fixed input, if its kernel keeps its weights outside of its parameters."""
    if (packed := getattr(layer, "cpu_linear", None)) is not None:
        weight = layer.weight
        # A packed module may have given away its own weight. Then its declared input width counts.
        width = weight.shape[-1] if weight.numel() else getattr(layer, "input_size_per_partition", None)
        return packed(_probe(width or layer.input_size, weight.dtype), weight, None)
    if hasattr(getattr(getattr(layer, "scheme", None), "kernel", None), "dnnl_handler"):  # int8
        return layer.quant_method.apply(layer, _probe(layer.input_size_per_partition, layer.params_dtype), None)
    return None


def _probe(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, width).unsqueeze(0).to(dtype)
