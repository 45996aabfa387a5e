"""What our code adds to vLLM's workers: it loads versions by vLLM's reload, and on GPUs by copies (`direct.py`)."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
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

from penstock.errors import PenstockError, WeightsError
from penstock.plugin.compat import without_adapters
from penstock.plugin.patches import attempt
from penstock.plugin.spec import checksum_of_sums, schemes_of, weights_checksum
from penstock.rooms import plugged_as, plugged_in
from penstock.weights.checksum import warm_up
from penstock.weights.manifest import Source, WeightManifest


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's Worker, so attributes have names of their own.

    Errors are returned, since vLLM passes on no more than the text of one that is raised, and no other worker's answer.
    """

    def penstock_source(self, transport: str) -> Source:
        """The source of a transport; one for the worker's whole life. WeightsError: there is none of that name."""
        sources: dict[str, Source] = self.__dict__.setdefault("_penstock_sources", {})
        if transport not in sources:
            if transport not in (known := plugged_as("source")):
                raise WeightsError(f"this engine has no transport {transport!r}; it has {', '.join(known)}")
            sources[transport] = plugged_in(f"source.{transport}")(torch.device(self.device))
        return sources[transport]

    def penstock_warm_up(self) -> None:
        """Begin to compile the checksum kernel in a thread; else the first update's `prepare` would hold a step."""
        if self.device.type != "cpu":
            threading.Thread(target=warm_up, args=(self.device,), name="penstock-warm-up", daemon=True).start()

    def penstock_prepare(self, manifest: dict[str, Any]) -> str | None:
        """Do what can be done while the engine generates (`Source.prepare`); return why it cannot be loaded, if so."""

        def work() -> None:
            version = WeightManifest.from_json(manifest)
            self.penstock_source(version.transport).prepare(version)
            self.__dict__.setdefault("_penstock_loader", Loader(self)).prepare(version)
            self._penstock_manifest = version

        return _problem(work, "preparing a weight version")

    def penstock_join_group(self, group: dict[str, Any]) -> str | None:
        """Begin to join a group (`GroupSpec` as JSON), in a thread; return why it cannot be joined, if so."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which vLLM resets to 0 in the workers of dense models.
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return _problem(lambda: self.penstock_source("broadcast").join(group, rank), "joining a group")

    def penstock_prepared(self) -> int | None:
        """The version that `penstock_load` would load."""
        manifest: WeightManifest | None = getattr(self, "_penstock_manifest", None)
        return None if manifest is None else manifest.version

    def penstock_load(self, version: int) -> dict[str, Any]:
        """Load the prepared version in place; the engine must be paused.

        Returns:
            `{"checksum", "seconds": {"load", "checksum"}}`. On failure the model must not run: `{"error"}` until a
            version was loaded whole, or `{"fault"}` for good.
        """
        if self.penstock_prepared() != version:
            return {"error": f"weight version {version} is not prepared here"}
        manifest = self._penstock_manifest

        def work() -> dict[str, Any]:
            began = time.perf_counter()
            known = self._penstock_loader.load(manifest, self.penstock_source(manifest.transport))
            self._penstock_manifest = None
            loaded = time.perf_counter()
            # To read all weights again would be most of the bubble; what is known without is as good.
            checksum = checksum_of_sums(manifest) if known else self.penstock_checksum()
            return {"checksum": checksum, "seconds": {"load": loaded - began, "checksum": time.perf_counter() - loaded}}

        loaded, error = attempt(work, f"loading weight version {version}")
        return loaded or {"error" if isinstance(error, PenstockError) else "fault": _text_of(error)}

    def penstock_load_adapter(self, order: dict[str, Any]) -> str | None:
        """Load a LoRA adapter (`adapter_worker.load_adapter`); return why not, if it cannot. No step may run."""
        return _problem(lambda: plugged_in("adapters.load")(self, order), "loading an adapter")

    def penstock_adapter(self, step: str, given: Any) -> Any:
        """Do another step of a LoRA adapter (`adapter_worker.worker_step`)."""
        return plugged_in("adapters.worker")(self, step, given)

    def penstock_checksum(self) -> str:
        return weights_checksum(self.model_runner.get_model())

    def penstock_weights_dropped(self) -> None:
        """Clear what a sleep that drops weights leaves behind, before weights come.

        vLLM (0.26 to 0.33) drops all memory that was made while the model was loaded, and restores only its buffers.
        """
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()  # padding, which no update brings
        of_worker: Any = getattr(self.model_runner, "lora_manager", None)
        if of_worker is not None:
            _forget_adapters(of_worker._adapter_manager)  # noqa: SLF001 - vLLM has no call that only frees slots


def _forget_adapters(manager: Any) -> None:
    """Let every LoRA adapter be copied to the device again when it is next used; vLLM takes them for active."""
    for adapter in [adapter for adapter in manager.lora_index_to_id if adapter is not None]:
        manager.deactivate_adapter(adapter)
    manager._last_mapping = None  # noqa: SLF001 - the device's own table of slots is gone


def _problem(work: Callable[[], None], what: str) -> str | None:
    error = attempt(work, what)[1]
    return None if error is None else _text_of(error)


def _text_of(error: Exception | None) -> str:
    """An error's message; of one that is not ours the type too, since its message may say little."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


class Loader:
    """Loads versions into one worker's model."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._schemes: dict[str, Any] | None = None
        # Kernels of CPUs keep packed copies of the weights, so that copies alone would not change them.
        self.direct: Any = None if worker.device.type == "cpu" else plugged_in("load.direct")()
        """`direct.DirectLoads` of a GPU."""

    def prepare(self, manifest: WeightManifest) -> None:
        """Do what can be done before the pause; the weights in force stay as they are."""
        if self.direct is not None:
            self.direct.prepare(self._model, manifest)

    def load(self, manifest: WeightManifest, source: Source) -> bool:
        """Put every tensor of a prepared manifest in force; the engine must be paused.

        Returns:
            Whether what is in force was compared with what was sent.

        Raises:
            TransferError: the model is torn, and must not run.
        """
        if self.direct is not None and self.direct.proved:
            self.direct.copy(manifest, source)
            return source.compares
        self._reload(manifest, source)
        return False

    def _reload(self, manifest: WeightManifest, source: Source) -> None:
        """Load by vLLM's reload, which proves the copies of later versions or ends them."""
        proof = None if self.direct is None else self.direct.proof()

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
        receive(self._model, plugged_in("quantise.tensors")(self._schemes, tensors()) if self._schemes else tensors())
        finish(self._model, self._worker.model_config)
        if proof is not None and self.direct is not None:
            self.direct.settle(proof, self._model)

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()


# --- vLLM's reload ----------------------------------------------------------------------------------------------------


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


# Two repairs. On CPU vLLM computes with packed copies of weights, and its reload leaves some of them stale (seen on
# 0.32.0). Both end with the release that repacks in `finalize_layerwise_reload` (no issue names them; RFC 54477 would
# replace it).


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
