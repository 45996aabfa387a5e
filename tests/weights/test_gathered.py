"""Tensors that are gathered as a store asks for them: no store holds them all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import WeightsError
from penstock.fleet.stores import Stores
from penstock.settings import FleetConfig
from penstock.types import TensorSpec
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.manifest import TensorProvider
from penstock.weights.shared_memory import SharedMemoryStore

DTYPES = ["bfloat16", "float32", "int64", "bfloat16", "float32"]
SPECS = [TensorSpec(f"t{n}", dtype, (n + 2, 3)) for n, dtype in enumerate(DTYPES)]


class Gathered:
    def __init__(self) -> None:
        self.most = 0

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        before: list[weakref.ref[torch.Tensor]] = []
        for n, spec in enumerate(SPECS):
            tensor = torch.full(spec.shape, n, dtype=getattr(torch, spec.dtype))
            self.most = max(self.most, sum(one() is not None for one in before) + 1)
            before.append(weakref.ref(tensor))
            yield spec.name, tensor
            del tensor


@pytest.mark.parametrize(
    "make", [lambda _: SharedMemoryStore(), DiskStore, DeltaStore], ids=["memory", "disk", "delta"]
)
def test_a_store_holds_one_tensor_beside_the_next(tmp_path: Path, make: Callable[[Path], DiskStore]):
    store, gathered = make(tmp_path), Gathered()
    for version in (1, 2):
        manifest = store.publish(version, TensorProvider(gathered, specs=SPECS))
        store.commit(manifest)
    listed = make(tmp_path / "other").publish(1, [(name, tensor.clone()) for name, tensor in Gathered()()])
    assert [(e.name, e.checksum) for e in manifest.tensors] == [(e.name, e.checksum) for e in listed.tensors]
    assert gathered.most == 2
    store.close()


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        (SPECS[:-1], "'t4'.*given and not announced"),
        ([*SPECS, TensorSpec("t5", "float32", (1,))], "'t5' the first, were announced and not given"),
        ([*SPECS[:-1], TensorSpec("t4", "float32", (3, 6))], "'t4'.*given and not announced"),
    ],
)
def test_tensors_that_are_not_those_announced_are_refused(specs: list[TensorSpec], why: str):
    store = SharedMemoryStore()
    with pytest.raises(WeightsError, match=why):
        store.publish(1, TensorProvider(Gathered(), specs=specs))
    store.close()


def test_gathered_tensors_cannot_be_shown_in_their_place():
    stores = Stores(FleetConfig(weight_transport="cuda_ipc"), list, 1.0)
    with pytest.raises(WeightsError, match=r"cuda_ipc.*set fleet.weight_transport to auto"):
        stores.publish(1, TensorProvider(Gathered(), specs=SPECS))
