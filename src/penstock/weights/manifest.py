"""The contents of one version of the weights: the contract between a trainer's store and every engine."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from penstock.checks import reading, whole_number
from penstock.errors import StateError, UserError, WeightsError

if TYPE_CHECKING:
    import torch

    from penstock.control_types import NamedTensors, TensorSpec

    Place = Callable[["TensorEntry"], torch.Tensor | None]
    """The tensor's contiguous memory in the model, of the entry's dtype and shape, or None."""

ALIGNMENT = 256
"""Alignment of each tensor in a buffer, in bytes. It satisfies every dtype and a device copy."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

TIED_HEAD = "lm_head.weight"
SUMS = "sums:"
"""Prefix of the checksum of a rank that compared its loaded tensors with the sender's sums. Any other checksum starts
with a digest of the tensors that the rank holds. Ranks of one engine may differ in kind: a rank without memory for a
plan loads by vLLM's own reload."""


def kind_of(rank: str) -> str:
    """Return the kind of a rank's checksum: the part before its colon. Only equal kinds are compared."""
    return rank.rpartition(":")[0]


def by_rank(checksum: str) -> list[str]:
    """Split an engine's checksum into those of its ranks, in order."""
    return checksum.split("-")


def differ(checksum: str, other: str) -> bool:
    """Whether engines of one layout differ in a rank's checksum of one kind."""
    ranks = zip(by_rank(checksum), by_rank(other), strict=False)
    return any(mine != its and kind_of(mine) == kind_of(its) for mine, its in ranks)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: its checkpoint name, torch dtype name, shape, and the position of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int
    """A CRC-32 for bytes in host memory or a file, else the device's sum (`checksum.py`)."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def entry_of(spec: TensorSpec, offset: int = 0) -> TensorEntry:
    """Return a manifest's entry without a checksum."""
    return TensorEntry(spec.name, spec.dtype, spec.shape, offset, 0)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One version: its transport, its location, and every tensor in it.

    Attributes:
        version: weight version under which these bytes will be served.
        transport: name of the transport, such as `shared_memory`.
        location: data by which the transport finds the bytes, such as `{"path": ...}`.
        tensors: entries in the order of their bytes.
    """

    version: int
    transport: str
    location: Mapping[str, str]
    tensors: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def extent(self) -> int:
        """Bytes from the start of the buffer to the end of the last tensor."""
        return max((t.offset + t.nbytes for t in self.tensors), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "transport": self.transport,
            "location": dict(self.location),
            "tensors": [[t.name, t.dtype, list(t.shape), t.offset, t.checksum] for t in self.tensors],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read the output of `to_json`. WeightsError: a field is missing or malformed."""
        with reading("weight manifest", WeightsError):
            return cls(
                version=whole_number(data["version"], "its version", error=malformed),
                transport=str(data["transport"]),
                location={str(k): str(v) for k, v in data["location"].items()},
                tensors=tuple(_entry(*row) for row in data["tensors"]),
            )


def malformed(why: str) -> WeightsError:
    """Return the error for content that does not fit into a manifest."""
    return WeightsError(f"malformed weight manifest: {why}")


def _entry(name: Any, dtype: Any, shape: Any, offset: Any, checksum: Any) -> TensorEntry:
    entry = TensorEntry(str(name), str(dtype), tuple(shape), offset, checksum)
    for number in (*entry.shape, entry.offset):
        whole_number(number, f"each size of tensor {entry.name!r}", error=malformed)
    whole_number(entry.checksum, f"the checksum of tensor {entry.name!r}", most=2**64 - 1, error=malformed)
    if entry.dtype not in DTYPE_BYTES:
        raise malformed(f"tensor {entry.name!r} has the unknown dtype {entry.dtype!r}")
    return entry


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Expected tensors, and their allowed dtypes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, frozenset[str]]
    optional: frozenset[str]
    """Tensors that may be left out: the head of a model with tied embeddings."""

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless names, shapes and dtypes fit."""
        given = {entry.name: entry for entry in manifest.tensors}
        if extra := sorted(given.keys() - self.shapes.keys()):
            tied = extra == [TIED_HEAD] and TIED_HEAD in self.optional
            why = "; the embedding serves as head too: leave it out, as named_parameters() does" if tied else ""
            raise WeightsError(f"{len(extra)} tensors are not in the engine's model: {_some(extra)}{why}")
        if missing := sorted(self.shapes.keys() - given.keys() - self.optional):
            raise WeightsError(f"{len(missing)} tensors of the engine's model are missing: {_some(missing)}")
        for name, entry in given.items():
            if entry.shape != self.shapes[name]:
                raise WeightsError(f"tensor {name!r} has shape {entry.shape}, the engine's has {self.shapes[name]}")
            if entry.dtype not in self.dtypes[name]:
                allowed = " or ".join(sorted(self.dtypes[name]))
                raise WeightsError(f"tensor {name!r} is {entry.dtype}; the engine takes {allowed}: cast before sending")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""  # noqa: PLR2004
    return ", ".join(names[:3]) + more


class Store:
    """Holds versions of the weights. Methods block, and allow one caller at a time."""

    transport = ""
    current: WeightManifest | None = None
    """The last committed version if its bytes are still available; None before the first."""
    _closed = False

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Make tensors available to engines, and describe them. Only `commit` changes `current`.

        Args:
            version: weight version under which they will be served.
            named_tensors: pairs of checkpoint name and tensor, dense, on any device.

        Raises:
            WeightsError: a repeated name, no tensor at all, a dtype that no engine loads, NaN or infinity, or no room.
            StateError: the store is closed.
        """
        raise NotImplementedError

    def adopt(self, manifest: WeightManifest) -> WeightManifest:
        """Take another process's version for `commit`. WeightsError: unavailable."""
        if manifest.transport != self.transport:
            raise WeightsError(f"weights of {manifest.transport!r} cannot be adopted by a store of {self.transport!r}")
        return manifest

    def commit(self, manifest: WeightManifest) -> None:
        """Make a published version the current one, if the store owns its bytes."""

    def offered(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return the last published tensors, unless the store has a copy (None)."""

    def close(self) -> None:
        """Free everything that is held here. A second call is harmless."""
        self._closed = True

    def check_open(self) -> None:
        """Raise StateError once the store is closed."""
        if self._closed:
            raise StateError("the store of weights is closed: its fleet or engine was torn down")


class Source:
    """A transport on one worker, created with its device. It lives as long as the worker."""

    compares = False
    """Whether every tensor is compared with its sender's checksum, on this device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, manifest: WeightManifest) -> None:
        """Map, open and check between two steps. WeightsError: it cannot be loaded, and no weight has changed."""

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every whole tensor once, in the manifest's order, on any device; valid until the next one.

        A source that can write to given memory calls `place` first, and yields the memory that it filled.

        Raises:
            WeightsError: bytes are missing or wrong. The model may be torn.
        """
        raise NotImplementedError


@dataclass(eq=False)
class TensorProvider:
    """Tensors that the caller can give again for each iteration."""

    provide: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Starts a pass."""
    specs: Sequence[TensorSpec] | None = None
    """Specs of a pass, if known in advance. Then stores take the tensors one by one, and never hold all of them."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.provide())


def as_named_tensors(given: NamedTensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Convert the argument of `update_weights` to pairs; a module or a function becomes a `TensorProvider`.

    Raises:
        UserError: it has none of the accepted forms.
    """
    of_module: Any = getattr(given, "named_parameters", None)
    if callable(of_module):
        return TensorProvider(cast("Callable[[], Iterable[tuple[str, torch.Tensor]]]", of_module))
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        return cast("Iterable[tuple[str, torch.Tensor]]", given)
    if callable(cast("object", given)):
        return TensorProvider(cast("Callable[[], Iterable[tuple[str, torch.Tensor]]]", given))
    raise UserError(
        f"update_weights takes pairs of a name and a tensor, not a {type(cast('object', given)).__name__}; give "
        "model.named_parameters(), state_dict().items(), the model, or a function that returns such pairs"
    )
