"""What is checked of a version's bytes that lie in the host's memory, before workers see it.

It is done in a thread (`preparing.py`), because it takes seconds for large models and the engine generates meanwhile.
What takes so long, checksums and the search for NaN, lets other threads of the process run.
"""
# pyright: basic, reportMissingImports=false
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.plugin.broadcast import BroadcastWorker
from penstock.plugin.checksum import checksum_of_sums, weights_checksum
from penstock.plugin.reload import Loader
from penstock.plugin.sources import Source, make_source
from penstock.plugin.spec import check_bytes, check_tensors
from penstock.weights import delta, disk, shared_memory
from penstock.weights.checksum import warm_up
from penstock.weights.manifest import WeightManifest


class HostBytes:
    """Checks versions; of the transport `delta` it keeps the whole of the last one."""

    def __init__(self) -> None:
        self._base = None

    def check(self, manifest: WeightManifest, in_force: int) -> WeightManifest:
        """Read every byte that the host can read. Blocking.

        Args:
            manifest: of any transport.
            in_force: the version that the engine has; of the transport `delta` alone it matters.

        Returns:
            The manifest for the workers.

        Raises:
            WeightsError: bytes are gone, are not those that were sent, or hold NaN or infinity.
        """
        if manifest.transport == shared_memory.TRANSPORT:
            check_bytes(manifest)
        elif manifest.transport == disk.TRANSPORT:
            with disk.open_version(manifest) as file:
                check_tensors(manifest.tensors, lambda entry: file.read(entry.offset, entry.nbytes))
        elif manifest.transport == delta.TRANSPORT:
            if self._base is None:
                from penstock.plugin.delta import DeltaBase  # noqa: PLC0415 - needs zstd

                self._base = DeltaBase()
            return self._base.bring(manifest, in_force)
        return manifest


logger = logging.getLogger(__name__)


class WorkerExtension(BroadcastWorker):
    """Methods for `collective_rpc`; `self` is vLLM's Worker, so what is kept here has names of its own.

    What goes wrong is returned and not raised: what a worker raises arrives elsewhere as an Exception of no type, and
    what the other workers say does not arrive at all.
    """

    def penstock_source(self, transport: str) -> Source:
        """The source of a transport; one for the worker's whole life."""
        sources: dict[str, Source] = self.__dict__.setdefault("_penstock_sources", {})
        if transport not in sources:
            sources[transport] = make_source(transport, self)
        return sources[transport]

    def penstock_warm_up(self) -> None:
        """Begin to compile what sums weights, in a thread: in the first update's `prepare` no step could be made."""
        if self.device.type != "cpu":
            threading.Thread(target=warm_up, args=(self.device,), name="penstock-warm-up", daemon=True).start()

    def penstock_prepare(self, manifest: dict[str, Any]) -> str | None:
        """Do what can be done while the engine generates (see `Source.prepare`). Why it cannot be loaded, if so."""
        try:
            version = WeightManifest.from_json(manifest)
            self.penstock_source(version.transport).prepare(version)
            self.__dict__.setdefault("_penstock_loader", Loader(self)).prepare(version)
        except PenstockError as error:
            return str(error)
        except Exception as error:
            logger.exception("weight version %s cannot be prepared", manifest.get("version"))
            return _named(error)
        self._penstock_manifest = version
        return None

    def penstock_prepared(self) -> int | None:
        """The version that `penstock_load` would load."""
        manifest: WeightManifest | None = getattr(self, "_penstock_manifest", None)
        return None if manifest is None else manifest.version

    def penstock_load(self, version: int) -> dict[str, Any]:
        """Load the prepared version in place; the engine must be paused.

        Returns:
            `{"checksum", "seconds": {"load", "checksum"}}`. Else the model must not run: `{"error"}` until a version
            was loaded whole, `{"fault"}` where something unforeseen has happened.
        """
        manifest: WeightManifest | None = getattr(self, "_penstock_manifest", None)
        if manifest is None or manifest.version != version:
            return {"error": f"weight version {version} is not prepared here"}
        began = time.perf_counter()
        try:
            known = self._penstock_loader.load(manifest, self.penstock_source(manifest.transport))
            self._penstock_manifest = None
            loaded = time.perf_counter()
            # To read all weights again would be most of the bubble; what is known without is as good.
            checksum = checksum_of_sums(manifest) if known else self.penstock_checksum()
        except PenstockError as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("weight version %d was not loaded", version)
            return {"fault": _named(error)}
        self.penstock_in_force = version, checksum, manifest.location.get("path")
        return {"checksum": checksum, "seconds": {"load": loaded - began, "checksum": time.perf_counter() - loaded}}

    def penstock_checksum(self) -> str:
        """Checksum of the weights in force on this worker."""
        return weights_checksum(self.model_runner.get_model())

    def penstock_weights_dropped(self) -> None:
        """Put right what a sleep that drops weights leaves behind, when memory is back and before weights come.

        vLLM (0.26 to 0.33) gives back unsaved all memory that was made while the model was loaded, and restores of it
        only the model's buffers. The rest holds whatever is there after waking.
        """
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()  # padding, which no update brings
        of_worker: Any = getattr(self.model_runner, "lora_manager", None)
        if of_worker is not None:
            _forget_adapters(of_worker._adapter_manager)  # noqa: SLF001 - vLLM has no call that only frees slots


def _forget_adapters(manager: Any) -> None:
    """Let every LoRA adapter be copied to the device again, from host memory, when it is next asked for.

    vLLM still takes those in the device's slots for active.
    """
    for adapter in [adapter for adapter in manager.lora_index_to_id if adapter is not None]:
        manager.deactivate_adapter(adapter)
    manager._last_mapping = None  # noqa: SLF001 - what the device was last told of slots, which is gone too


def _named(error: Exception) -> str:
    """An error that is not ours, and whose message may say little; where it happened is in the engine's log."""
    return f"{type(error).__name__}: {error}"
