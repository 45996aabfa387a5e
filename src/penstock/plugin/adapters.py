"""A model under its checkpoint's names while it serves LoRA adapters.

vLLM wraps every layer that an adapter may change: `qkv_proj.weight` becomes `qkv_proj.base_layer.weight`, and the
model's own `load_weights` does not find it any more (0.26; in 0.32 the wrappers know the names of what they wrap).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Put the wrapped layers in the place of their wrappers, for as long as weights are loaded. No step may run."""
    from vllm.lora.layers import BaseLayerWithLoRA  # noqa: PLC0415 - slow, and not needed by models without

    wrappers = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for module, name, child in wrappers:
        setattr(module, name, child.base_layer)
    try:
        yield
    finally:
        for module, name, child in wrappers:
            setattr(module, name, child)
