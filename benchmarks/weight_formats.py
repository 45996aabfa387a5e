"""What a version costs on disk and as a delta, where 1%, 5% and all of its elements have changed.

    python benchmarks/weight_formats.py [--gib 1.0] [--folder FOLDER]

bfloat16 tensors of the sizes of a transformer, changed at random places by the last bits, as a step of training does.
Bytes that are written, seconds to publish them, to prepare (an engine reads, checks and assembles them)
and to apply (a worker copies them to where its weights are). The peer is the version whole, by the transport disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import _common
import torch

from penstock.rooms import plugged_in
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.manifest import Source, WeightManifest

CHANGED = (0.01, 0.05, 1.0)
BYTES_BARS = {0.01: 0.03, 0.05: 0.10, 1.0: 0.75}
"""Of the whole. Of a changed element its place and its new bits; where all changed, exponents stay."""
SECONDS_BARS = {0.01: 3.0, 0.05: 3.5, 1.0: 6.0}
"""Of the whole's. Publishing reads the old version too, and compares; preparing reads a delta and checks the result."""
ROWS, COLUMNS = 2048, 1024


@dataclass(frozen=True, slots=True)
class Round:
    """One version by one transport."""

    nbytes: int
    publish: float
    prepare: float
    apply: float


class Engine:
    """What of an engine takes part: who checks and who loads, and weights in memory of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.model = torch.nn.Module()
        for name, tensor in tensors.items():
            self.model.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        self._sources: dict[str, Source] = {}

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """Both halves."""
        local = plugged_in(f"check.{manifest.transport}")(manifest)
        self._source(local).prepare(local)
        return local

    def apply(self, local: WeightManifest) -> None:
        """Copy what is brought."""
        source = self._source(local)
        for entry, tensor in source.tensors(local, lambda _: None):
            self.model.get_parameter(entry.name).copy_(tensor)

    def _source(self, manifest: WeightManifest) -> Source:
        if manifest.transport not in self._sources:
            self._sources[manifest.transport] = plugged_in(f"source.{manifest.transport}")(torch.device("cpu"))
        return self._sources[manifest.transport]


def one_round(
    store: DiskStore | DeltaStore, folder: Path, engine: Engine, version: int, tensors: dict[str, torch.Tensor]
) -> Round:
    """Publish, prepare, apply, commit."""
    before = {file.name for file in folder.glob("v*")}
    began = time.perf_counter()
    manifest = store.publish(version, tensors.items())
    published = time.perf_counter()
    local = engine.prepare(manifest)
    prepared = time.perf_counter()
    engine.apply(local)
    applied = time.perf_counter()
    store.commit(manifest)
    nbytes = sum(file.stat().st_size for file in folder.glob("v*") if file.name not in before)
    return Round(nbytes, published - began, prepared - published, applied - prepared)


def change(tensors: dict[str, torch.Tensor], fraction: float) -> None:
    """Change the last three bits of so many elements, chosen at random, in place."""
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).view(-1)
        moved = torch.randint(1, 8, bits.shape, dtype=torch.int16)
        if fraction < 1:
            moved *= torch.rand(bits.shape) < fraction
        bits.bitwise_xor_(moved)


def rows(ours: Round, whole: Round, fraction: float) -> list[_common.Row]:
    """The delta against the whole."""
    case, seconds = f"delta, {fraction:.0%} changed", SECONDS_BARS[fraction]
    return [
        _common.compare(f"{case}: bytes", ours.nbytes, whole.nbytes, bar=BYTES_BARS[fraction], want="at most"),
        _common.compare(f"{case}: publish, s", ours.publish, whole.publish, bar=seconds, want="at most"),
        _common.compare(f"{case}: prepare, s", ours.prepare, whole.prepare, bar=seconds, want="at most"),
        _common.compare(f"{case}: apply, s", ours.apply, whole.apply, bar=2.5, want="at most"),
    ]


def measure(gib: float, folder: Path) -> list[_common.Row]:
    """Both transports on the same versions, one after the other."""
    torch.manual_seed(0)
    count = max(1, round(gib * _common.GIB / (ROWS * COLUMNS * 2)))
    tensors = {f"layer{i}": torch.randn(ROWS, COLUMNS).mul_(0.02).to(torch.bfloat16) for i in range(count)}
    places = folder / "disk", folder / "delta"
    stores = DiskStore(places[0]), DeltaStore(places[1])
    engines = Engine(tensors), Engine(tensors)
    found: list[_common.Row] = []
    for version, fraction in enumerate((0.0, *CHANGED), start=1):
        change(tensors, fraction)
        whole, ours = (
            one_round(store, place, engine, version, tensors)
            for store, place, engine in zip(stores, places, engines, strict=True)
        )
        _common.note(f"{fraction:.0%} changed: whole {whole}, delta {ours}")
        if fraction:
            found += rows(ours, whole, fraction)
    for store in stores:
        store.close()
    return found


def main() -> int:
    """Run it in a folder that is removed."""
    options: argparse.ArgumentParser = _common.parser(__doc__ or "")
    options.add_argument("--gib", type=float, default=1.0, help="size of a version; three times that in memory")
    options.add_argument("--folder", help="where versions are written; default: the system's for temporary files")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        return _common.report("weight_formats", measure(0.05 if given.quick else given.gib, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
