"""What cannot be sent, to every store: no pairs of a name and a dense tensor, or no weights of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.errors import WeightsError
from penstock.fleet.stores import Stores
from penstock.settings import FleetConfig
from penstock.weights.broadcast import BroadcastStore
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.manifest import Store
from penstock.weights.pack import checked
from penstock.weights.shared_memory import SharedMemoryStore

STORES = {
    "auto": lambda _: Stores(FleetConfig(), lambda: (), 1.0),
    "shared_memory": lambda _: SharedMemoryStore(),
    "broadcast": lambda _: BroadcastStore(),
    "disk": DiskStore,
    "delta": DeltaStore,
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = STORES[request.param](tmp_path)
    yield made
    made.close()


@contextmanager
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["w", "v"], "pairs of a name and a torch.Tensor, got a str"),
        ([torch.ones(2)], "got a Tensor"),
        ([("w", [1.0, 2.0])], r"got one of \(str, list\)"),
        ([(0, torch.ones(2))], r"got one of \(int, Tensor\)"),
        ([("w", torch.ones(2), 3)], r"got one of \(str, Tensor, int\)"),
        ([("w", torch.ones(2, device="meta"))], "'w' is on the meta device"),
        ([("w", torch.eye(2).to_sparse())], "'w' is of layout torch.sparse_coo"),
        ([], "no tensors given"),
        ([("w", torch.ones(2)), ("w", torch.ones(2))], "'w' is given twice"),
        ([("w", torch.ones(2, dtype=torch.complex64))], "'w' has dtype torch.complex64, which no engine loads"),
        ([("v", torch.ones(2)), ("w", torch.tensor([1.0, float("nan")]))], "'w' holds NaN or infinity"),
        ([("w", torch.tensor([[1.0], [float("-inf")]], dtype=torch.bfloat16))], "'w' holds NaN or infinity"),
        ([("w", torch.tensor([0.5, float("nan")]).to(torch.float8_e4m3fn))], "'w' holds NaN or infinity"),
    ],
    ids=str,
)
def test_it_is_said_so(store: Store, given: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        store.publish(1, given)


def test_a_shard_is_no_whole_tensor(store: Store) -> None:
    with one_rank():
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(WeightsError, match=r"'w' is a DTensor, of which this process has one shard; gather it"):
            store.publish(1, [("w", sharded)])


def test_parameters_and_lists_are_pairs_too() -> None:
    assert [name for name, _ in checked(torch.nn.Linear(2, 2).named_parameters())] == ["weight", "bias"]
    assert [name for name, _ in checked([["w", torch.ones(1)]])] == ["w"]  # type: ignore[list-item]


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU of its first element's number."""

    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", int(self.as_subclass(torch.Tensor)[0]))


def test_each_gpu_has_computed_them_before_the_first_of_its_tensors_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    given = [(name, torch.tensor([float(gpu)]).as_subclass(OnGpu)) for name, gpu in (("a", 0), ("b", 1), ("c", 0))]
    had = [(name, [str(device) for device in done]) for name, _ in checked(given)]
    assert had == [("a", ["cuda:0"]), ("b", ["cuda:0", "cuda:1"]), ("c", ["cuda:0", "cuda:1"])]
