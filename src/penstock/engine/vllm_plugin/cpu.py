"""Two repairs that vLLM's layerwise reload needs on CPU (both seen on 0.32.0; without them outputs are silently stale).

On CPU vLLM packs weight matrices into a kernel's own layout after loading, and computes with the packed copy.

1. Tied embeddings: `ParallelLMHead` shares its weight with the embedding, so the reload fills the embedding and never
   repacks the head: logits keep coming from the old copy. After a reload we pack such modules again.
2. Mixture of experts: `UnquantizedFusedMoEMethod` repacks only when it has no kernel yet. Before a reload we take the
   kernel away, so that loading builds it anew.

Both end with the release of vLLM that repacks in `finalize_layerwise_reload` (no issue of vLLM's names them; its RFC
54477 would replace the mechanism). On GPUs neither applies.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform


def before_reload(model: torch.nn.Module) -> None:
    """Repair 2: let loading rebuild the expert kernels."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def after_reload(model: torch.nn.Module) -> None:
    """Repair 1: pack again what kept a usable weight beside its packed copy."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415 - absent on GPU builds

    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
