"""Weights of the simulated engine: which are in force, whether offered ones may follow, and how they come.

Updates are ours (prepare, apply; by broadcast it joins the real group and receives the real bytes, and drops them) and
vLLM's own (init, start, update, finish).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import threading
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import StateError, TransferError, WeightsError
from penstock.sim.faults import FaultKind, Phase
from penstock.sim.scheduler import version_of
from penstock.types import PauseMode, TensorSpec
from penstock.weights import delta, disk
from penstock.weights.broadcast import TRANSPORT as BROADCAST
from penstock.weights.group import GroupSpec
from penstock.weights.manifest import DTYPE_BYTES, TensorEntry, WeightManifest
from penstock.wire import INITIAL_VERSION

if TYPE_CHECKING:
    from penstock.sim.engine import SimEngine
    from penstock.weights.collective import Group


_HALF_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""All exponent bits set: infinity, and NaN above it."""


def check_manifest(manifest: WeightManifest, specs: Sequence[TensorSpec] | None) -> str:
    """Everything that the real engine checks before it touches its weights.

    Args:
        manifest: the offer. Where its file exists, the bytes are mapped and checked.
        specs: what the engine's model holds; None: any tensors.

    Returns:
        The checksum that the weights will have: over the CRC-32 of every tensor in order of name.

    Raises:
        WeightsError: a tensor is missing, extra, misshapen, of another dtype, damaged, or holds NaN.
    """
    names = [t.name for t in manifest.tensors]
    if not names:
        raise WeightsError("the manifest holds no tensors")
    if twice := {n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else set[str]():
        raise WeightsError(f"tensors given twice: {sorted(twice)}")
    for tensor in manifest.tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise WeightsError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}")
    if specs is not None:
        _check_specs(manifest.tensors, {spec.name: spec for spec in specs})
    if manifest.transport == "shared_memory" and "path" in manifest.location:
        _check_bytes(Path(manifest.location["path"]), manifest.tensors)
    elif manifest.transport in {disk.TRANSPORT, delta.TRANSPORT}:
        _check_files(manifest)
    return checksum_of(manifest.tensors)


def checksum_of(tensors: Sequence[TensorEntry]) -> str:
    """BLAKE2b over name and CRC-32 of every tensor, in order of name; 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{tensor.checksum}\0".encode())
    return digest.hexdigest()


def _check_specs(tensors: Sequence[TensorEntry], specs: dict[str, TensorSpec]) -> None:
    given = {t.name for t in tensors}
    if missing := sorted(specs.keys() - given):
        raise WeightsError(f"missing tensors: {missing[:5]}{' ...' if len(missing) > 5 else ''}")  # noqa: PLR2004
    if extra := sorted(given - specs.keys()):
        raise WeightsError(f"the model has no tensors {extra[:5]}{' ...' if len(extra) > 5 else ''}")  # noqa: PLR2004
    for tensor in tensors:
        spec = specs[tensor.name]
        if tensor.shape != spec.shape:
            raise WeightsError(f"tensor {tensor.name!r} has shape {tensor.shape}, the model's has {spec.shape}")
        if tensor.dtype != spec.dtype:
            raise WeightsError(f"tensor {tensor.name!r} has dtype {tensor.dtype}, the model's has {spec.dtype}")


def _check_bytes(path: Path, tensors: Sequence[TensorEntry]) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            for tensor in tensors:
                _check_tensor(os.pread(file.fileno(), tensor.nbytes, tensor.offset), tensor)
    except FileNotFoundError:
        # A simulated trainer need not have bytes; the manifest alone is then what is checked.
        return
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read the weights at {path}: {error}") from error


def _check_files(manifest: WeightManifest) -> None:
    """Every tensor of a whole file; a delta as it was sent, since it takes torch to see what it makes."""
    changed = delta.read_delta(manifest) if manifest.transport == delta.TRANSPORT else None
    with disk.open_version(manifest) as whole:
        for tensor in manifest.tensors if changed is None else ():
            _check_tensor(whole.read(tensor.offset, tensor.nbytes), tensor)


def _check_tensor(raw: bytes | memoryview, tensor: TensorEntry) -> None:
    if len(raw) != tensor.nbytes:
        raise WeightsError(f"tensor {tensor.name!r} ends beyond the bytes that are there")
    if (found := zlib.crc32(raw)) != tensor.checksum:
        raise WeightsError(f"tensor {tensor.name!r} has the checksum {found}, the manifest says {tensor.checksum}")
    if _has_nan(bytes(raw), tensor.dtype):
        raise WeightsError(f"tensor {tensor.name!r} holds NaN or infinity")


def _has_nan(raw: bytes, dtype: str) -> bool:
    if dtype in ("float32", "float64"):
        # A sum is finite if and only if every part is, but for overflow, which the second look settles.
        values = array("f" if dtype == "float32" else "d", raw)
        return not math.isfinite(sum(values)) and not all(map(math.isfinite, values))
    exponent = _HALF_EXPONENT.get(dtype)
    return exponent is not None and any(half & exponent == exponent for half in array("H", raw))


class SimGroup:
    """Of one engine, which is one worker. Needs torch from the first `join` on."""

    def __init__(self) -> None:
        self._group: Group | None = None

    def join(self, body: Any) -> None:
        """Begin to join a group, in the place of the one before it. Raises WeightsError where it cannot."""
        spec = GroupSpec.from_json(body)
        if spec.backend != "tcp":
            raise WeightsError(f"the simulated engine has no GPU, and the group runs over {spec.backend}")
        if self._group is not None:
            self._group.end(f"group {spec.epoch} takes its place")
            self._group = None
        threading.Thread(target=self._join, args=(spec,), name="sim-join", daemon=True).start()

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the engine is in the group over which a version will be sent."""
        group, epoch = self._group, manifest.location.get("epoch")
        if group is None or group.spec.epoch != epoch or group.cut is not None or not group.ready:
            raise WeightsError(f"this engine is not in group {epoch}, over which the weights come")

    async def receive(self, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
        """Receive a version: its tensors with the CRC-32 of what came.

        Raises:
            TransferError: it was cut, or is not what was sent.
        """
        group = self._group
        if group is None:
            raise TransferError("this engine is in no group")
        return await asyncio.to_thread(_receive, group, manifest)

    def _join(self, spec: GroupSpec) -> None:
        import torch  # noqa: PLC0415 - the simulated engine must start without it

        from penstock.weights.collective import Group  # noqa: PLC0415

        self._group = Group(spec, spec.rank_offset, torch.device("cpu"))
        with suppress(TransferError):  # the trainer finds this rank absent
            self._group.join()


def _receive(group: Group, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
    import torch  # noqa: PLC0415

    from penstock.weights.transfer import receive  # noqa: PLC0415

    bucket_bytes = int(manifest.location["bucket_bytes"])
    return tuple(
        replace(entry, checksum=zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()))
        for entry, tensor in receive(group, manifest.tensors, bucket_bytes=bucket_bytes, place=lambda _: None)
    )


class WeightState:
    """Which weights are in force, how they are labelled, and the update under way."""

    def __init__(self, engine: SimEngine) -> None:
        self.label = INITIAL_VERSION
        """What tokens are labelled with; vLLM's word for the weights as loaded."""
        self.identity = 0
        """The weights themselves: what tokens depend on. Equal to the label's version unless somebody errs."""
        self.checksum = "0" * 16
        self.kv_kept: int | None = None
        """The version of the last update, if that kept the KV cache."""
        self.unfit: str | None = None
        """Why generation would kill the engine: an update failed half-way."""
        self.group = SimGroup()
        """Over which it receives what is broadcast."""
        self._engine = engine
        self._prepared: tuple[WeightManifest, str] | None = None
        self._initialised = False
        self._round: str | None = None
        """Step of vLLM's protocol that was done last: `started` or `updated`."""
        self._unnamed = itertools.count(-1, -1)

    @property
    def version(self) -> int:
        """The label as our integer."""
        return version_of(self.label)

    # --- ours ---------------------------------------------------------------------------------------------------------

    async def prepare(self, manifest: WeightManifest) -> None:
        """Check an offered version while generating; nothing in force changes.

        Raises:
            WeightsError: it does not fit.
        """
        engine = self._engine
        await engine.at(Phase.PREPARE)
        await engine.clock.sleep(engine.config.prepare_seconds)
        engine.check_alive()
        if manifest.transport == BROADCAST:
            self.group.check(manifest)
        self._prepared = (manifest, check_manifest(manifest, engine.config.tensor_specs))

    async def apply(self, version: int, *, clear_cache: bool = True) -> dict[str, Any]:
        """Pause (keep), load what was prepared, label it, resume; an engine that was paused stays paused.

        Returns:
            `version`, `seconds` of each phase, `preempted`, `checksum`, as ARCHITECTURE.md has it.

        Raises:
            StateError: that version was not prepared; nothing was changed.
            TransferError: its bytes did not all come. The engine is torn, and paused until a version came whole.
        """
        prepared = self._prepared
        if prepared is None or prepared[0].version != version:
            has = "none is" if prepared is None else f"{prepared[0].version} is"
            raise StateError(f"weight version {version} was not prepared ({has}); call prepare first")
        self._prepared = None
        engine, clock = self._engine, self._engine.clock
        begin = clock.time()
        preempted = await engine.pause(PauseMode.KEEP, clear_cache=clear_cache)
        paused = clock.time()
        engine.holds.weights_are_out()
        checksum = await self._load(prepared[0], prepared[1])
        self.kv_kept = None if clear_cache else version
        loaded = clock.time()
        await engine.holds.weights_are_in()
        end = clock.time()
        seconds = {"pause": paused - begin, "load": loaded - paused, "resume": end - loaded, "bubble": end - begin}
        return {"version": version, "seconds": seconds, "preempted": preempted, "checksum": checksum}

    async def _load(self, manifest: WeightManifest, checksum: str) -> str:
        engine, version = self._engine, manifest.version
        self.unfit = f"loading version {version} did not end"
        await engine.at(Phase.LOAD)
        await engine.clock.sleep(engine.config.load_seconds)
        if manifest.transport == BROADCAST:
            checksum = checksum_of(await self.group.receive(manifest))
        engine.check_alive()
        self.unfit = None
        self.identity, self.checksum = version, checksum
        if engine.faults.take(Phase.LOAD, FaultKind.WRONG_LABEL) is None:
            self.label = str(version)
        wrong = engine.faults.take(Phase.LOAD, FaultKind.WRONG_CHECKSUM)
        return checksum if wrong is None else checksum[::-1]

    # --- vLLM's -------------------------------------------------------------------------------------------------------

    def init_transfer(self) -> None:
        """`/init_weight_transfer_engine`."""
        self._engine.check_alive()
        self._initialised = True

    def start(self) -> None:
        """`/start_weight_update`. While requests run it kills the engine, as it kills vLLM.

        Raises:
            StateError: not initialised, or a round is under way.
            EngineDeadError: it was not paused.
        """
        engine = self._engine
        engine.check_alive()
        if not self._initialised:
            raise StateError("Weight transfer engine is not initialized; call /init_weight_transfer_engine first.")
        if self._round is not None:
            raise StateError("A weight update is already active; finish it first.")
        if engine.scheduler.running and not engine.paused:
            engine.die(FaultKind.CORE_DEATH, "start_weight_update while requests run")
            engine.check_alive()
        self._round = "started"
        self.unfit = "a weight update was started and not finished"

    async def update(self) -> None:
        """`/update_weights`. Raises StateError before `start`; a failure after it leaves the engine unfit."""
        self._engine.check_alive()
        if self._round is None:
            raise StateError("start_weight_update must be called before update_weights.")
        await self._engine.at(Phase.LOAD)
        await self._engine.clock.sleep(self._engine.config.load_seconds)
        self._engine.check_alive()
        self._round = "updated"

    def finish(self, version: str | None) -> None:
        """`/finish_weight_update`: the weights are in force, labelled `version` where one is given."""
        self._engine.check_alive()
        if self._round is None:
            raise StateError("start_weight_update must be called before finish_weight_update.")
        if self._round == "updated":
            self.unfit = None
            self.identity = next(self._unnamed) if version is None else version_of(version)
        if version is not None:
            self.label = version
        self._round = None

    def relabel(self, version: str) -> None:
        """`/update_weight_version`: another label for the same weights."""
        self._engine.check_alive()
        self.label = version
