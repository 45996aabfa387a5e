"""Whether updates of a model can be plain copies, and which.

vLLM's layerwise reload loads any model right, at a price: each layer is taken apart, its tensors are gathered, loaded
into new memory, processed, and copied to where the kernels look. For an unquantised model on a GPU all of this comes
down to copies, and which ones does not depend on the values. So they are found once, by running the model's own
`load_weights` on tensors without memory (torch's meta device) and noting every `copy_` from them (`direct_plan.py`),
and then proved: the layerwise reload is run on random tensors, and what it would have put in force must be, bit for
bit, what the copies make (`direct_proof.py`). A model for which this fails in any way is reloaded by vLLM as ever.

Neither writes to anything in force, not for a moment: the engine generates, and a step may be on the GPU (vLLM launches
steps before the last one has ended, and calls its workers between two launches).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MMEncoderAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.v1.attention.backend import AttentionImplBase

from penstock.engine.vllm_plugin.direct_plan import DirectPlan, NotDirectError, trace
from penstock.engine.vllm_plugin.direct_proof import Proof
from penstock.weights.manifest import TensorEntry

logger = logging.getLogger("vllm.penstock")
"""Below vLLM's own, which alone has a handler in a worker: what is said here is in the engine's log."""

PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""vLLM's methods that keep nothing else of the weights than the parameters themselves."""


def make_plan(
    model: torch.nn.Module, model_config: Any, entries: Sequence[TensorEntry], device: torch.device
) -> DirectPlan | None:
    """The proved plan of a model for tensors of these names, dtypes and shapes; None where there is none.

    The model's weights stay as they are; no step may be launched meanwhile.
    """
    try:
        _refuse_what_derives(model)
        with torch.no_grad(), _nothing_kept(model):
            plan = DirectPlan(trace(model, entries))
            Proof(model, entries, plan, device).run(model_config)
    except Exception as error:  # noqa: BLE001 - the reload of vLLM is right in any case, and only slower
        logger.warning("updates are loaded by vLLM's layerwise reload, which takes longer than copies: %r", error)
        return None
    logger.info("updates of %d tensors are copied to their places", len(entries))
    return plan


def _refuse_what_derives(model: torch.nn.Module) -> None:
    """Raise NotDirectError for what computes other tensors from weights once they are loaded: only a reload does so."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        after_loading = getattr(type(module), "process_weights_after_loading", None)
        if after_loading is not None and not isinstance(module, QuantizeMethodBase):  # seen with the layer whose it is
            if not _derives_nothing(module, after_loading):
                raise NotDirectError(f"{name}, a {kind}, may compute other tensors from weights once they are loaded")
            continue  # its method scales its KV cache: no weight, unless the checkpoint has scales (`Proof` sees those)
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS | {"NoneType"}:
            raise NotDirectError(f"{name} is a {kind} with {type(method).__name__}")


def _derives_nothing(layer: Any, after_loading: Callable[..., None]) -> bool:
    """Whether a layer with a method of its own for what comes after loading (0.26 to 0.32) derives nothing there."""
    if after_loading is MMEncoderAttention.process_weights_after_loading:
        return True  # reads scales of a file
    if after_loading is not Attention.process_weights_after_loading:
        return False  # MLA's, for one, absorbs a projection
    variants = layer.impl.get_impl_variants() if hasattr(layer.impl, "get_impl_variants") else (layer.impl,)
    return all(
        type(impl).process_weights_after_loading is AttentionImplBase.process_weights_after_loading
        # FlashInfer and b12x compute with a copy of the attention sinks, unless there are none, or of float32.
        or (hasattr(impl, "_sinks_source") and impl.sinks is impl._sinks_source)  # noqa: SLF001
        for impl in variants
    )


@contextmanager
def _nothing_kept(model: torch.nn.Module) -> Iterator[None]:
    """Raise NotDirectError where a module, or what computes for it, holds other tensors afterwards, and undo that.

    A model's `load_weights` may compute such from what it has loaded; parameters and buffers are not meant.
    """
    owners = (
        (module, getattr(module, "impl", None), getattr(module, "quant_method", None)) for module in model.modules()
    )
    held = [vars(owner) for of_module in owners for owner in of_module if hasattr(owner, "__dict__")]
    before = [dict(attributes) for attributes in held]
    changed: list[str] = []
    try:
        yield
    finally:
        for now, then in zip(held, before, strict=True):
            for key in now.keys() | then.keys():
                values = now.get(key), then.get(key)
                if values[0] is not values[1] and any(isinstance(value, torch.Tensor) for value in values):
                    changed.append(key)
                    del now[key]
                    now.update((name, value) for name, value in then.items() if name == key)
    if changed:
        raise NotDirectError(f"loading computes {changed[0]}")
