"""Quantises updates, and checkpoints of floats, on their way into an engine that computes in int8 or fp8.

A trainer sends floats. vLLM's reload takes the contents of the model's checkpoint: integers or fp8 numbers, and their
scales. Each whole matrix is quantised before ranks take their parts, so engines of any layout get the same numbers.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import torch

from penstock.errors import WeightsError
from penstock.plugin import QUANTISING_LOADER
from penstock.plugin.spec import FLOATS, Entry, schemes_of

_LARGEST = {torch.int8: 127.5, torch.float8_e4m3fn: 448.0}
"""Value that the largest magnitude maps to. For int8 it is half of the range, as in llm-compressor."""
_CHUNK = 16 * 2**20
"""Number of fp32 elements that are held at once."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantisation of a matrix: symmetric, with one scale per tensor, row or block."""

    dtype: torch.dtype
    strategy: Literal["tensor", "channel", "block"]
    scale: str = "weight_scale"
    block: tuple[int, int] = (0, 0)

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix `[out, in]` in `dtype`, and its fp32 scales: `[1]`, `[out, 1]` or one per block."""
        rows, columns = weight.shape
        if self.strategy == "block":
            tall, wide = self.block
            padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % tall))
            blocks = padded.view(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
            scale = self._scale(blocks.abs().amax((1, 3)))
            return self._rounded(blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns], scale
        whole = self.strategy == "tensor"
        largest = weight.abs().amax().reshape(1) if whole else weight.abs().amax(1, keepdim=True)
        scale = self._scale(largest.float())
        step = max(1, _CHUNK // max(1, columns))
        parts = [
            self._rounded(weight[at : at + step].float() / (scale if whole else scale[at : at + step]))
            for at in range(0, rows, step)
        ]
        return torch.cat(parts), scale

    def name_of_scale(self, name: str) -> str:
        """Return the name of the scales of a matrix `LAYER.weight`."""
        return name.removesuffix("weight") + self.scale

    def _scale(self, largest: torch.Tensor) -> torch.Tensor:
        return (largest / _LARGEST[self.dtype]).clamp_min(torch.finfo(torch.float32).tiny)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.int8:
            return values.round().clamp(-128, 127).to(torch.int8)
        return values.clamp(-448.0, 448.0).to(self.dtype)


def quantised(
    schemes: Mapping[str, Scheme], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a quantised checkpoint's tensors from those of a float one. `schemes` go by matrix names."""
    for name, tensor in tensors:
        if (scheme := schemes.get(name)) is None:
            yield name, tensor
            continue
        values, scale = scheme.quantise(tensor)
        yield name, values
        yield scheme.name_of_scale(name), scale


def find_schemes(quantisation: Any, entries: Sequence[Entry]) -> dict[str, Scheme]:
    """Find the matrices of a checkpoint that an update must quantise.

    WeightsError: the checkpoint has more than matrices and their scales, such as calibrated activations.
    """
    scheme, targets = _scheme_of(quantisation if isinstance(quantisation, Mapping) else quantisation.to_dict())
    held = {name: dtype for name, dtype, _ in entries}
    scales = {scheme.name_of_scale(name): name for name in held if name.endswith(".weight")}
    found = {matrix: scheme for name, matrix in scales.items() if name in held}
    if not found:  # a checkpoint of floats, which the loader below reads
        found = {name: scheme for name in held if _is_target(name, targets)}
    if rest := [name for name, dtype in held.items() if _is_more(name, dtype, found, scales)]:
        raise WeightsError(
            f"{len(rest)} tensors of the quantised checkpoint cannot be computed from weights, such as {rest[0]!r}; "
            "updates need int8 or fp8 matrices with scales of weights alone, and activations scaled as they come"
        )
    return found


def _is_target(name: str, targets: Sequence[str]) -> bool:
    layer = name.removesuffix(".weight")
    return any(t.startswith("re:") and re.match(t[3:], layer) for t in targets) and layer != name


def _is_more(name: str, dtype: str, found: Mapping[str, Scheme], scales: Mapping[str, str]) -> bool:
    if name in found or name in scales:
        return False
    return dtype not in FLOATS or name.endswith(("input_scale", "k_scale", "v_scale", "zero_point", "weight_shape"))


def _scheme_of(config: Any) -> tuple[Scheme, Sequence[str]]:
    method = config.get("quant_method")
    if method == "fp8" and config.get("weight_block_size"):
        tall, wide = config["weight_block_size"]
        return Scheme(torch.float8_e4m3fn, "block", "weight_scale_inv", (tall, wide)), ()
    groups: Mapping[str, Any] = config.get("config_groups") or {}
    if method != "compressed-tensors" or len(groups) != 1:
        raise WeightsError(
            f"updates cannot be quantised by {method!r}: known are compressed-tensors with one group, and fp8 in blocks"
        )
    [group] = groups.values()
    weights = group["weights"]
    strategy, kind = weights.get("strategy"), (weights.get("type"), weights.get("num_bits"))
    dtype = {("int", 8): torch.int8, ("float", 8): torch.float8_e4m3fn}.get(kind)
    if dtype is None or strategy not in {"tensor", "channel"} or not weights.get("symmetric", True):
        raise WeightsError(
            f"updates cannot be quantised to {kind[1]} bits of {kind[0]} by {strategy!r}; known are symmetric int8 and "
            "fp8 by tensor or channel"
        )
    return Scheme(dtype, strategy), group["targets"]


# --- what vLLM needs -------------------------------------------------------------------------------------------------


def load(schemes: Mapping[str, Scheme], tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors for a reload, as `quantised`, with long-lived scales."""
    _keep_scales()
    return quantised(schemes, tensors)


@functools.cache
def register_loader() -> None:
    """Give vLLM a loader for a quantised model with a checkpoint of floats."""
    from vllm.model_executor.model_loader import register_model_loader  # noqa: PLC0415 - only inside vLLM
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: PLC0415

    class QuantisingLoader(DefaultModelLoader):
        def __init__(self, load_config: Any) -> None:
            super().__init__(replace(load_config, load_format="auto"))

        def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, torch.Tensor]]:
            yield from quantised(schemes_of(model_config), super().get_all_weights(model_config, model))

    register_model_loader(QUANTISING_LOADER)(QuantisingLoader)


@functools.cache
def _keep_scales() -> None:
    """Keep scales as long as oneDNN's copy of int8 weights, which reads them by address. A reload would free them."""
    ops: Any = import_module("vllm._custom_ops")
    create = ops.create_onednn_scaled_mm

    def create_and_keep(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any) -> Any:
        handler = create(weight, weight_scales, *args)
        handler.weight_scales = weight_scales
        return handler

    ops.create_onednn_scaled_mm = create_and_keep
