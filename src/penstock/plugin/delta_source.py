"""A worker's view of a version that its engine made of deltas (`delta_base.py`)."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.plugin.checksum import weights_checksum
from penstock.plugin.sources import Place
from penstock.errors import WeightsError
from penstock.parsing import parse_json, reading
from penstock.weights.manifest import TensorEntry, WeightManifest
from penstock.weights.pack import view
from penstock.weights.shared_memory import open_mapping


class DeltaSource:
    """Maps the whole version; brings only what changed, where what is in force is the delta's base for certain."""

    partial = False
    """Set by who loads: whether tensors may be left out that are in force as they are."""
    compares = False

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._changed: frozenset[int] | None = None

    def prepare(self, manifest: WeightManifest) -> None:
        """See whether the model has the base in force, by the checksum that it had when the base was loaded.

        A label would not do: after a sleep that dropped the weights, or a load that failed half-way, it is as before.
        And a base of the same number out of another image, that of another process, may be of another chain.
        """
        self._changed = None
        if "base" in manifest.location:
            checksum = weights_checksum(self._worker.model_runner.get_model())
            base = int(manifest.location["base"]), checksum, manifest.location.get("path")
            if base == getattr(self._worker, "penstock_in_force", None):
                self._changed = _numbers(manifest)

    def tensors(self, manifest: WeightManifest, place: Place) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Views of the mapping; where `partial` is set and the base is in force, only of tensors that changed."""
        del place
        changed, self._changed = self._changed, None
        buffer = memoryview(open_mapping(manifest.location.get("path", ""), manifest.extent))
        for number, entry in enumerate(manifest.tensors):
            if not self.partial or changed is None or number in changed:
                yield entry, view(buffer, entry)


def _numbers(manifest: WeightManifest) -> frozenset[int]:
    with reading("weight manifest", WeightsError):
        return frozenset(parse_json(manifest.location["changed"], "malformed weight manifest: `changed`", WeightsError))
