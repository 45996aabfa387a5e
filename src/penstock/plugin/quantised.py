"""What vLLM needs for models that are quantised: a loader of float checkpoints, and scales that live long enough."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from penstock.plugin import QUANTISING_LOADER
from penstock.plugin.spec import schemes_of
from penstock.weights.quantise import quantised


class QuantisingLoader(DefaultModelLoader):
    """vLLM's default loader for a model that is quantised and a checkpoint that is not."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a quantised checkpoint would hold."""
        return quantised(schemes_of(model_config), super().get_all_weights(model_config, model))


@functools.cache
def register_loader() -> None:
    """Give vLLM the loader under its name."""
    register_model_loader(QUANTISING_LOADER)(QuantisingLoader)


@functools.cache
def keep_scales() -> None:
    """Let scales live as long as oneDNN's copy of int8 weights, which reads them by address: a reload frees them."""
    ops: Any = import_module("vllm._custom_ops")
    create = ops.create_onednn_scaled_mm

    def create_and_keep(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any) -> Any:
        handler = create(weight, weight_scales, *args)
        handler.weight_scales = weight_scales
        return handler

    ops.create_onednn_scaled_mm = create_and_keep
