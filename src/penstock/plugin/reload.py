"""Loads a version into a worker's model: by copies if they are proved (`direct.py`), else by vLLM's reload."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    layerwise,
)
from vllm.platforms import current_platform

from penstock.plugin.compat import without_adapters
from penstock.plugin.direct import DirectPlan, Proof, make_plan
from penstock.plugin.sources import Source
from penstock.plugin.spec import schemes_of
from penstock.rooms import plugged_in
from penstock.weights.manifest import WeightManifest


class Loader:
    """Loads versions into one worker's model; it keeps the plan for tensors of the same names and shapes."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._plan: DirectPlan | None = None
        self._proved = False
        self._planned: tuple[Any, ...] | None = None
        self._schemes: dict[str, Any] | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """Make the plan, unless it is made; the weights in force stay as they are."""
        planned = tuple((e.name, e.dtype, e.shape) for e in manifest.tensors)
        if self._worker.device.type != "cuda" or planned == self._planned:
            return  # kernels of CPUs keep packed copies of the weights
        with without_adapters(self._model):
            self._plan = make_plan(self._model, manifest.tensors)
        self._planned, self._proved = planned, False

    def load(self, manifest: WeightManifest, source: Source) -> bool:
        """Put every tensor of a prepared manifest in force; the engine must be paused.

        Returns:
            Whether what is in force was compared with what was sent.

        Raises:
            TransferError: the model is torn, and must not run.
        """
        plan = self._plan if self._proved else None
        if plan is None:
            self._reload(manifest, source)
            return False
        with torch.no_grad():
            for entry, tensor in source.tensors(manifest, plan.place):
                plan.put(entry.name, tensor)
        torch.accelerator.synchronize()
        return source.compares

    def _reload(self, manifest: WeightManifest, source: Source) -> None:
        """Load by vLLM's reload, which proves the plan or ends it."""
        proof = None if self._plan is None else Proof(self._plan)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for entry, tensor in source.tensors(manifest, lambda _: None):
                # Copied in any case: vLLM keeps tensors until their layer is complete, some until `finish`, and what
                # a source yields is valid until the next one.
                copy = tensor.to(self._worker.device, copy=True)
                if proof is not None:
                    proof.note(entry.name, copy)
                yield entry.name, copy

        if self._schemes is None:
            self._schemes = schemes_of(self._worker.model_config)
        begin(self._model)
        if self._schemes:
            plugged_in("quantise.kept_scales")()
            receive(self._model, plugged_in("quantise.tensors")(self._schemes, tensors()))
        else:
            receive(self._model, tensors())
        finish(self._model, self._worker.model_config)
        if proof is not None:
            with without_adapters(self._model):
                self._proved = proof.holds(self._model)
            self._plan = self._plan if self._proved else None

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()


def begin(model: Any) -> None:
    """Put the layers into loading state; until `finish` the model cannot run."""
    with without_adapters(model):
        if current_platform.is_cpu():
            _rebuild_experts(model)
        initialize_layerwise_reload(model)


def receive(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint tensors into a model that `begin` has prepared. After an error it can begin again."""
    with without_adapters(model), ExitStack() as undo:
        undo.callback(_put_back, model)  # else the next reload would count what came of this one as its own
        model.load_weights(tensors)
        undo.pop_all()


def finish(model: Any, model_config: Any) -> None:
    """Take the layers out of loading state, with the loaded weights in force."""
    with without_adapters(model):
        finalize_layerwise_reload(model, model_config)
        if current_platform.is_cpu():
            _pack_again(model)
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()  # torch would keep what the largest layers took meanwhile


def _put_back(model: Any) -> None:
    """Give layers that wait for tensors those that they had."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - vLLM has no call that ends a reload halfway
            info.reset()


# --- Two repairs that vLLM's reload needs on CPU ---------------------------------------------------------------------
# On CPU vLLM computes with packed copies of weights, and its reload leaves some of them stale (seen on 0.32.0). Both
# end with the release that repacks in `finalize_layerwise_reload` (no issue names them; RFC 54477 would replace it).


def _rebuild_experts(model: torch.nn.Module) -> None:
    """Take their kernel away: `UnquantizedFusedMoEMethod` packs again only without one."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_again(model: torch.nn.Module) -> None:
    """Pack tied heads: the reload fills the embedding, and never packs the `ParallelLMHead` that shares its weight."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
