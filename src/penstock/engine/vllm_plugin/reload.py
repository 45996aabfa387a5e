"""Puts the tensors of a version into the model of a worker, by vLLM's layerwise reload."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.engine.vllm_plugin import cpu
from penstock.engine.vllm_plugin.sources import Source
from penstock.weights.manifest import WeightManifest


def load(worker: Any, manifest: WeightManifest, source: Source) -> None:
    """Load every tensor of the manifest; the engine must be paused.

    Raises:
        WeightsError: of the source. The model is torn then, and must not run.
    """
    model = worker.model_runner.get_model()
    begin(model)
    model.load_weights((e.name, tensor.to(worker.device)) for e, tensor in source.tensors(manifest, lambda _: None))
    finish(model, worker.model_config)


def begin(model: Any) -> None:
    """Put the layers into loading state. From here to `finish` the model cannot run."""
    cpu.before_reload(model)
    initialize_layerwise_reload(model)


def finish(model: Any, model_config: Any) -> None:
    """Take the layers out of loading state, with the loaded weights in force."""
    finalize_layerwise_reload(model, model_config)
    cpu.after_reload(model)
