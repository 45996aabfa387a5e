"""Our extension of vLLM's workers: loads versions by vLLM's reload, on GPUs by copies (`direct.py`), and sums them."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.platforms import current_platform

from penstock.errors import PenstockError, WeightsError
from penstock.plugin import attempt
from penstock.rooms import plugged_as, plugged_in
from penstock.weights.checksum import device_sums
from penstock.weights.manifest import SUMS, Source, WeightManifest


class WorkerExtension:
    """Methods for `collective_rpc`. `self` is vLLM's Worker, so attributes have a prefix of ours.

    Errors are returned. If one were raised, vLLM would pass on only its text, and no other worker's answer.
    """

    def penstock_source(self, transport: str) -> Source:
        """Return the source of a transport, the same for the worker's whole life. WeightsError: it is unknown."""
        sources: dict[str, Source] = self.__dict__.setdefault("_penstock_sources", {})
        if transport not in sources:
            if transport not in (known := plugged_as("source")):
                raise WeightsError(f"this engine has no transport {transport!r}; it has {', '.join(known)}")
            sources[transport] = plugged_in(f"source.{transport}")(torch.device(self.device))
        return sources[transport]

    def penstock_warm_up(self) -> None:
        """Compile the checksum kernel in a thread, so that no step waits for it."""
        if self.device.type != "cpu":
            warm_up = plugged_in("sums.warm_up")
            threading.Thread(target=warm_up, args=(self.device,), name="penstock-warm-up", daemon=True).start()

    def penstock_prepare(self, manifest: dict[str, Any]) -> str | None:
        """Prepare a version during generation. Return the reason if that fails."""

        def work() -> None:
            version = WeightManifest.from_json(manifest)
            self.penstock_source(version.transport).prepare(version)
            self.__dict__.setdefault("_penstock_loader", Loader(self)).prepare(version)
            self._penstock_manifest = version

        return _problem(work, "preparing a weight version")

    def penstock_join_group(self, group: dict[str, Any]) -> str | None:
        """Start to join a group (`GroupSpec` as JSON), in a thread. Return the reason if that fails."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which vLLM resets to 0 in the workers of dense models.
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return _problem(lambda: self.penstock_source("broadcast").join(group, rank), "joining a group")

    def penstock_prepared(self) -> int | None:
        """Return the version that `penstock_load` would load."""
        manifest: WeightManifest | None = getattr(self, "_penstock_manifest", None)
        return None if manifest is None else manifest.version

    def penstock_load(self, version: int) -> dict[str, Any]:
        """Load the prepared version in place. The engine must be paused.

        Returns:
            `{"checksum", "seconds": {"load", "checksum"}}`. On failure the model must not run: `{"error"}` until a
            version is loaded whole, or `{"fault"}` for good.
        """
        if self.penstock_prepared() != version:
            return {"error": f"weight version {version} is not prepared here"}
        manifest = self._penstock_manifest

        def work() -> dict[str, Any]:
            began = time.perf_counter()
            known = self._penstock_loader.load(manifest, self.penstock_source(manifest.transport))
            self._penstock_manifest = None
            loaded = time.perf_counter()
            # Reading all weights again would be most of the bubble. The sums known without it are as good.
            checksum = checksum_of_sums(manifest) if known else self.penstock_checksum()
            return {"checksum": checksum, "seconds": {"load": loaded - began, "checksum": time.perf_counter() - loaded}}

        loaded, error = attempt(work, f"loading weight version {version}")
        return loaded or {"error" if isinstance(error, PenstockError) else "fault": _text_of(error)}

    def penstock_checksum(self) -> str:
        return weights_checksum(self.model_runner.get_model())


def _problem(work: Callable[[], None], what: str) -> str | None:
    error = attempt(work, what)[1]
    return None if error is None else _text_of(error)


def _text_of(error: Exception | None) -> str:
    """Return an error's message, with its type if the error is not ours."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


class Loader:
    """Loads versions into one worker's model."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._schemes: dict[str, Any] | None = None
        # CPU kernels keep packed copies of the weights, so copies alone would not change them.
        self.direct: Any = None if worker.device.type == "cpu" else plugged_in("load.direct")()
        """`direct.DirectLoads` on a GPU, else None."""

    def prepare(self, manifest: WeightManifest) -> None:
        """Do what is possible before the pause. The weights in force stay the same."""
        if self.direct is not None:
            self.direct.prepare(self._model, manifest)

    def load(self, manifest: WeightManifest, source: Source) -> bool:
        """Put every tensor of a prepared manifest in force. The engine must be paused.

        Returns:
            Whether the loaded tensors were compared with the sent ones.

        Raises:
            TransferError: the model is torn and must not run.
        """
        if self.direct is not None and self.direct.proved:
            self.direct.copy(manifest, source)
            return source.compares
        self._reload(manifest, source)
        return False

    def _reload(self, manifest: WeightManifest, source: Source) -> None:
        """Load by vLLM's reload, which proves or rules out copies for later versions."""
        proof = None if self.direct is None else self.direct.proof()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for entry, tensor in source.tensors(manifest, lambda _: None):
                # Always copied: vLLM keeps tensors until their layer is complete, some until `finish`, but a source's
                # tensor is only valid until the next one.
                copy = tensor.to(self._worker.device, copy=True)
                if proof is not None:
                    proof.note(entry.name, copy)
                yield entry.name, copy

        if self._schemes is None:
            config = self._worker.model_config
            quantised = getattr(config.hf_config, "quantization_config", None) is not None
            self._schemes = plugged_in("spec.schemes")(config) if quantised else {}
        lora = getattr(self._worker.model_runner, "lora_manager", None) is not None
        with plugged_in("compat.bare")(self._model) if lora else nullcontext():
            begin(self._model)
            given = plugged_in("quantise.tensors")(self._schemes, tensors()) if self._schemes else tensors()
            receive(self._model, given)
            finish(self._model, self._worker.model_config)
        if proof is not None and self.direct is not None:
            self.direct.settle(proof, self._model)

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()


# --- vLLM's reload ----------------------------------------------------------------------------------------------------


def begin(model: Any) -> None:
    """Put the layers into loading state. The model cannot run until `finish`."""
    if current_platform.is_cpu():
        _rebuild_experts(model)
    initialize_layerwise_reload(model)


def receive(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load checkpoint tensors into a model after `begin`. After an error, `begin` may be called again."""
    with ExitStack() as undo:
        undo.callback(_put_back, model)  # else the next reload would count the tensors of this one as its own
        model.load_weights(tensors)
        undo.pop_all()


def finish(model: Any, model_config: Any) -> None:
    """Take the layers out of loading state, with the loaded weights in force."""
    finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu():
        _pack_again(model)
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()  # torch would keep the memory that the largest layers used during the reload


def _put_back(model: Any) -> None:
    """Give layers that wait for tensors their earlier tensors back."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - vLLM has no call that ends a reload halfway
            info.reset()


# Two repairs. On CPUs vLLM computes with packed copies of weights, and its reload leaves some of them stale (seen on
# 0.32.0). Both end with the release that repacks in `finalize_layerwise_reload`. No issue names them; RFC 54477 would
# replace that function.


def _rebuild_experts(model: torch.nn.Module) -> None:
    """Remove the experts' kernel, since vLLM packs again only without one."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_again(model: torch.nn.Module) -> None:
    """Pack tied heads. The reload fills the embedding, but never packs the `ParallelLMHead` that shares its weight."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


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
