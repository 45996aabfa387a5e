"""Weights and LoRA adapters of the simulated engine: those in force, and the checks of those on offer.

With broadcast, the engine joins the real group, receives the real bytes and discards them.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.control_types import TensorSpec
from penstock.errors import StateError, UserError, WeightsError
from penstock.sim.config import SimConfig
from penstock.weights import delta, disk, shared_memory
from penstock.weights.broadcast import BroadcastSource
from penstock.weights.manifest import TensorEntry, WeightManifest, WeightSpec
from penstock.wire import INITIAL_VERSION, UNKNOWN_VERSION, Notes, version_of_tokens


def check_manifest(manifest: WeightManifest, specs: Sequence[TensorSpec] | None) -> str:
    """Check an offered version against `specs`, and its bytes by its checksums.

    Without `specs`, any tensors are accepted. The bytes of a broadcast are not there yet. For a delta only its own
    bytes are checked; a real engine also checks the result. Returns the checksum that the weights will have, over the
    CRC-32 of every tensor in order of name.

    WeightsError: a tensor is missing, extra, damaged, or has a wrong shape or dtype.
    """
    if specs is not None:
        dtypes = {spec.name: frozenset({spec.dtype}) for spec in specs}
        WeightSpec({spec.name: spec.shape for spec in specs}, dtypes, frozenset()).check(manifest)
    if manifest.transport == shared_memory.TRANSPORT and "path" in manifest.location:
        memory = memoryview(shared_memory.open_mapping(manifest.location["path"], manifest.extent))
        _check_sums(manifest, lambda entry: memory[entry.offset : entry.offset + entry.nbytes])
    elif manifest.transport in {disk.TRANSPORT, delta.TRANSPORT}:
        changed = delta.read_delta(manifest) if manifest.transport == delta.TRANSPORT else None
        with disk.open_version(manifest) as whole:
            if changed is None:  # a check of a delta's result would need numpy
                _check_sums(manifest, lambda entry: whole.read(entry.offset, entry.nbytes))
    return checksum_of(manifest.tensors)


def _check_sums(manifest: WeightManifest, read: Callable[[TensorEntry], memoryview]) -> None:
    for entry in manifest.tensors:
        if (found := zlib.crc32(read(entry))) != entry.checksum:
            raise WeightsError(f"tensor {entry.name!r} has the checksum {found}, the manifest says {entry.checksum}")


def checksum_of(tensors: Sequence[TensorEntry]) -> str:
    """Return BLAKE2b over names and CRC-32s in order of name, as 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{tensor.checksum}\0".encode())
    return digest.hexdigest()


async def receive_broadcast(source: BroadcastSource, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
    """Receive a version. Return its tensors with the CRC-32 of the received bytes.

    Raises:
        TransferError: the transfer was cut, or the bytes differ from those that were sent.
    """

    def receive() -> tuple[TensorEntry, ...]:
        import torch  # noqa: PLC0415 - the simulated engine must start without it

        return tuple(
            replace(entry, checksum=zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()))
            for entry, tensor in source.tensors(manifest, lambda _: None)
        )

    return await asyncio.to_thread(receive)


class WeightState:
    """The weights in force, their label, and the update under way."""

    def __init__(self) -> None:
        self.label = INITIAL_VERSION
        """Label of new tokens, as vLLM writes it."""
        self.identity = 0
        """The weights themselves, which decide tokens. Equals the label's version unless there is an error."""
        self.checksum = "0" * 16
        self.kv_kept: int | None = None
        """The version of the last update, if that update kept the KV cache."""
        self.unfit: str | None = None
        """The reason why generation would kill the engine: an update failed half-way."""
        self.group = BroadcastSource()
        """Receiver of broadcasts."""
        self.prepared: tuple[WeightManifest, str] | None = None
        """The last version on offer, and the checksum it will have."""
        self.initialised = False
        """vLLM's protocol: whether the transfer engine exists."""
        self.updates: int | None = None
        """vLLM's protocol: finished steps of the current update; None without an update."""
        self._unlabelled = itertools.count(UNKNOWN_VERSION - 1, -1)

    @property
    def version(self) -> int:
        return version_of_tokens(self.label)

    def start(self) -> None:
        """Begin a native update. Raises StateError if none may begin."""
        if not self.initialised:
            raise StateError("Weight transfer engine is not initialized; call /init_weight_transfer_engine first.")
        if self.updates is not None:
            raise StateError("A weight update is already active; finish it first.")
        self.updates, self.unfit = 0, "a weight update was started and not finished"

    def started(self, call: str) -> int:
        """Return the steps of the native update. StateError: `call` needs one."""
        if self.updates is None:
            raise StateError(f"start_weight_update must be called before {call}.")
        return self.updates

    def update(self) -> None:
        """Count a received step. Raises StateError without a native update under way."""
        self.updates = self.started("update_weights") + 1

    def finish(self, label: str | None) -> None:
        """Put a native update in force, with a label if one is given."""
        if self.started("finish_weight_update"):
            named = UNKNOWN_VERSION if label is None else version_of_tokens(label)
            self.unfit, self.identity = None, next(self._unlabelled) if named == UNKNOWN_VERSION else named
        if label is not None:
            self.label = label
        self.updates = None


class NotFoundError(UserError):
    """There is no model or adapter of that name. `param` is the request's field with the name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True)
class _Adapter:
    content: str
    """Path of the adapter, or a digest of its bytes. It decides the adapter's tokens."""
    version: int | None
    used: float
    """Monotonic time of its last request."""


class Adapters:
    """Loaded LoRA adapters by name."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self.loaded: dict[str, _Adapter] = {}

    def note_use(self, name: str | None) -> None:
        if (known := self.loaded.get(name or "")) is not None:
            known.used = time.monotonic()

    def notes(self, name: str | None) -> Notes:
        """Return the labels of the adapter's tokens, as our plugin in vLLM gives them."""
        if name is None or self._config.plain:
            return {}
        known = self.loaded.get(name)
        if known is None or known.version is None:
            return {"adapter": name}
        return {"adapter": name, "adapter_version": known.version}

    def served(self, name: str, in_flight: int) -> dict[str, Any]:
        """Return an adapter's version, requests in flight, and idle seconds."""
        known = self.loaded[name]
        return {"version": known.version, "in_flight": in_flight, "idle_s": time.monotonic() - known.used}

    def forget(self, name: str) -> None:
        """Forget an adapter. Harmless if there is none."""
        self.loaded.pop(name, None)

    def load(self, name: str, content: str, *, version: int | None = None) -> None:
        """Load an adapter. Requests of this name continue with it, as in vLLM.

        Raises:
            UserError: the name or the content is empty, or there is no room.
        """
        if not name or not content:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.")
        if name not in self.loaded and len(self.loaded) >= self._config.max_loras:
            raise UserError(f"No room for lora adapter '{name}': {self._config.max_loras} are loaded.")
        self.loaded[name] = _Adapter(content, version, time.monotonic())

    def content(self, name: str | None) -> str:
        """Return an adapter's content; empty for the base and for one that is gone."""
        known = self.loaded.get(name or "")
        return "" if known is None else known.content


def content_of(source: Mapping[str, Any]) -> str:
    """Return an adapter's content: a digest of its file, or its path without one.

    Raises:
        UserError: the file is unreadable.
    """
    if (file := source.get("file")) is None:
        return str(source.get("path") or "")
    try:
        return f"{zlib.crc32(Path(file).read_bytes()):08x}"
    except OSError as error:
        raise UserError(f"the adapter's file {file} cannot be read: {error.strerror}") from error
