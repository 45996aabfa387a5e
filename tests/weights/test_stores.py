"""What every store keeps to: what goes in comes out, what cannot be sent is named, and none holds all of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from penstock.control_types import TensorSpec
from penstock.errors import WeightsError
from penstock.fleet.transports import stores_of
from penstock.rooms import plugged_in
from penstock.settings import FleetConfig
from penstock.weights.broadcast import BroadcastStore
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.weights.manifest import Store, TensorProvider, WeightManifest
from penstock.weights.pack import checked
from penstock.weights.shared_memory import SharedMemoryStore

STORES = {
    "auto": lambda _: stores_of(FleetConfig(), lambda: (), 1.0),
    "shared_memory": lambda _: SharedMemoryStore(),
    "broadcast": lambda _: BroadcastStore(),
    "disk": DiskStore,
    "delta": DeltaStore,
}
KEEPING = pytest.mark.parametrize(
    "make", [lambda _: SharedMemoryStore(), DiskStore, DeltaStore], ids=["memory", "disk", "delta"]
)
TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "a": torch.arange(12, dtype=torch.float32).view(3, 4).t(),  # not contiguous
    "b.half": torch.randn(7, dtype=torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 5),
    "quantized": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
}


def loaded(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """What a worker gets, of bytes that its core has checked."""
    local = plugged_in(f"check.{manifest.transport}")(WeightManifest.from_json(manifest.to_json()))
    source = plugged_in(f"source.{local.transport}")(torch.device("cpu"))
    source.prepare(local)
    return {entry.name: tensor.clone() for entry, tensor in source.tensors(local, lambda _: None)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@KEEPING
def test_what_goes_in_comes_out(tmp_path: Path, make: Callable[[Path], Store]) -> None:
    store = make(tmp_path)
    for version in (1, 2):
        TENSORS["a"][0, 0] = version
        manifest = store.publish(version, TENSORS.items())
        store.commit(manifest)
        assert same(loaded(manifest), TENSORS)
    assert manifest.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    store.close()


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


# --- Tensors that are gathered as a store asks for them --------------------------------------------------------------

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


@KEEPING
def test_a_store_holds_one_tensor_beside_the_next(tmp_path: Path, make: Callable[[Path], Store]):
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


def test_gathered_tensors_are_not_all_held_where_the_trainer_is_asked_again():
    engine: Any = SimpleNamespace(url="http://127.0.0.1:1")
    stores, gathered = stores_of(FleetConfig(weight_transport="broadcast"), lambda: [engine] * 2, 10.0), Gathered()
    stores.commit(stores.publish(1, TensorProvider(gathered, specs=SPECS)))
    assert stores.for_engine(engine, 1) is not None
    assert gathered.most == 2
    stores.close()


def test_gathered_tensors_cannot_be_shown_in_their_place():
    stores = stores_of(FleetConfig(weight_transport="cuda_ipc"), list, 1.0)
    with pytest.raises(WeightsError, match=r"cuda_ipc.*set fleet.weight_transport to auto"):
        stores.publish(1, TensorProvider(Gathered(), specs=SPECS))
