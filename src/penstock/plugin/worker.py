"""The methods that our code adds to vLLM's workers: they load weights, and join the groups that bring them."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.plugin.patches import attempt
from penstock.plugin.reload import Loader
from penstock.plugin.sources import Source, make_source
from penstock.plugin.spec import checksum_of_sums, weights_checksum
from penstock.rooms import plugged_in
from penstock.weights.checksum import warm_up
from penstock.weights.manifest import WeightManifest


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's Worker, so attributes have names of their own.

    Errors are returned, since vLLM passes on no more than the text of one that is raised, and no other worker's answer.
    """

    def penstock_source(self, transport: str) -> Source:
        """The source of a transport; one for the worker's whole life."""
        sources: dict[str, Source] = self.__dict__.setdefault("_penstock_sources", {})
        if transport not in sources:
            sources[transport] = make_source(transport, self)
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

        return _text_of(attempt(work, "preparing a weight version")[1])

    def penstock_join_group(self, group: dict[str, Any]) -> str | None:
        """Begin to join a group (`GroupSpec` as JSON), in a thread; return why it cannot be joined, if so."""
        return _text_of(attempt(lambda: plugged_in("group.join")(self, group), "joining a group")[1])

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
        manifest: WeightManifest | None = getattr(self, "_penstock_manifest", None)
        if manifest is None or manifest.version != version:
            return {"error": f"weight version {version} is not prepared here"}

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
        """Load a LoRA adapter (`adapters.load_adapter`); return why it cannot be loaded, if so. No step may run."""
        return _text_of(attempt(lambda: plugged_in("adapters.load")(self, order), "loading an adapter")[1])

    def penstock_unload_adapter(self, number: int) -> None:
        """Forget a LoRA adapter."""
        plugged_in("adapters.unload")(self, number)

    def penstock_checksum(self) -> str:
        """Checksum of the weights in force on this worker."""
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


def _text_of(error: Exception | None) -> str | None:
    """An error's message; of one that is not ours the type too, since its message may say little."""
    return (
        None
        if error is None
        else str(error)
        if isinstance(error, PenstockError)
        else f"{type(error).__name__}: {error}"
    )
