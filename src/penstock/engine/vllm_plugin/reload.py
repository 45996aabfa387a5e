"""Puts the tensors of a version into the model of a worker: in place where that is proved, else by vLLM's reload."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.engine.vllm_plugin import cpu
from penstock.engine.vllm_plugin.adapters import without_adapters
from penstock.engine.vllm_plugin.direct_load import make_plan
from penstock.engine.vllm_plugin.direct_plan import DirectPlan
from penstock.engine.vllm_plugin.direct_proof import put_back
from penstock.engine.vllm_plugin.sources import Source
from penstock.weights.manifest import WeightManifest


class Loader:
    """Loads versions into one worker's model; it remembers the plan for tensors of the same names and shapes."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._plan: DirectPlan | None = None
        self._planned: tuple[Any, ...] | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """Make the plan, if it is not made; the weights in force stay as they are. No step may be launched meanwhile.

        On CPUs there is none: their kernels keep packed copies of the weights.
        """
        planned = tuple((e.name, e.dtype, e.shape) for e in manifest.tensors)
        if self._worker.device.type != "cuda" or planned == self._planned:
            return
        model = self._worker.model_runner.get_model()
        with without_adapters(model):
            self._plan = make_plan(model, self._worker.model_config, manifest.tensors, self._worker.device)
        self._planned = planned
        _free_unused(self._worker.device)

    def load(self, manifest: WeightManifest, source: Source) -> bool:
        """Put every tensor of a prepared manifest in force; the engine must be paused.

        Returns:
            Whether what is in force is known to be what was sent: compared on this device, and put in place by copies.

        Raises:
            TransferError: of the source. The model is torn then, and must not run.
        """
        plan, model = self._plan, self._worker.model_runner.get_model()
        source.partial = plan is not None  # vLLM's reload takes a layer apart until all of it has come
        if plan is None:
            begin(model)
            tensors = source.tensors(manifest, lambda _: None)
            # Copied in any case: vLLM keeps them until their layer is complete, some until `finish`, and what a source
            # yields is its own again, or unmapped, once the next is asked for.
            receive(model, ((entry.name, tensor.to(self._worker.device, copy=True)) for entry, tensor in tensors))
            finish(model, self._worker.model_config)
            return False
        with torch.no_grad():
            for entry, tensor in source.tensors(manifest, plan.place):
                plan.put(entry.name, tensor)
        torch.accelerator.synchronize()
        return source.compares


def begin(model: Any) -> None:
    """Put the layers into loading state. From here to `finish` the model cannot run."""
    with without_adapters(model):
        cpu.before_reload(model)
        initialize_layerwise_reload(model)


def receive(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint tensors into a model that `begin` has prepared. After an error it can begin anew."""
    with without_adapters(model):
        try:
            model.load_weights(tensors)
        except BaseException:
            put_back(model)  # else the next reload would count what came of this one as its own
            raise


def finish(model: Any, model_config: Any) -> None:
    """Take the layers out of loading state, with the loaded weights in force."""
    with without_adapters(model):
        finalize_layerwise_reload(model, model_config)
        cpu.after_reload(model)
    _free_unused(next(model.parameters()).device)


def _free_unused(device: torch.device) -> None:
    """Give back the GPU memory of a proof or a reload: torch would keep it, as much as the largest layers take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
