"""By which transport a version goes: chosen by where tensors and engines are, or named."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet_fakes import FakeEngine

from patience import WAIT_S
from penstock.engine.capabilities import EngineInfo
from penstock.errors import WeightsError
from penstock.fleet.member import Lifecycle, Member
from penstock.fleet.transports import stores_of
from penstock.settings import FleetConfig
from penstock.weights import delta
from penstock.weights.manifest import as_named_tensors

HERE, THERE = "http://127.0.0.1:8000", "http://10.0.0.2:8000"
CPU, GPU_0, GPU_1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
WEIGHTS = [("w", torch.ones(3))]


def member(url: str, *gpus: str, engine: str = "vllm") -> Member:
    info = EngineInfo(engine, "0", 0, paused=False, tp=1, pp=1, dp=1, vocab_size=32, max_model_len=64, transports=())
    return Member("e0", url, FakeEngine("e0", []), info, Lifecycle("e0"), 0, gpus=gpus)


@pytest.mark.parametrize(
    ("device", "members", "expected"),
    [
        (CPU, [member(HERE), member(HERE)], "shared_memory"),
        (CPU, [member(HERE, "5"), member(THERE)], "broadcast"),
        (GPU_0, [member(HERE, engine="sim")], "shared_memory"),
        (GPU_0, [member(HERE, "6"), member(HERE, "7")], "broadcast"),
        (GPU_1, [member(HERE, "7")], "broadcast"),
        (GPU_0, [member(HERE, "5"), member(HERE, "6")], "cuda_ipc"),
        (GPU_1, [member(HERE, "5", "6")], "cuda_ipc"),
        (GPU_0, [member(HERE)], "broadcast"),
        (GPU_0, [member(THERE, "5")], "broadcast"),
    ],
)
def test_the_transport_follows_from_who_is_where(monkeypatch: Any, device: Any, members: Any, expected: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert stores_of(FleetConfig(), lambda: members, 10.0)._choose(device, gathers=False) == expected


def test_by_itself_it_takes_iterators_and_what_can_be_read_twice() -> None:
    stores = stores_of(FleetConfig(), lambda: [member(HERE)], 10.0)
    for given in (WEIGHTS, iter(WEIGHTS), dict(WEIGHTS).items()):
        manifest = stores.publish(1, given)
        assert (manifest.transport, [t.name for t in manifest.tensors]) == ("shared_memory", ["w"])
    with pytest.raises(WeightsError, match="no tensors given"):
        stores.publish(1, [])
    with pytest.raises(WeightsError, match="no transport 'pigeon'"):
        stores.adopt(SimpleNamespace(transport="pigeon"))  # type: ignore[arg-type]
    stores.close()


def test_to_look_at_the_first_tensor_is_no_pass_of_its_own() -> None:
    """Other ranks of a trainer that gathers tensors as they are read would be left in it."""
    begun = []

    class Gathered:
        def __iter__(self) -> Any:
            begun.append(len(begun))
            yield from WEIGHTS

    for engines in ([member(HERE)], [member(HERE), member(THERE)]):
        stores = stores_of(FleetConfig(weight_address="10.0.0.1"), lambda engines=engines: engines, 10.0)
        manifest = stores.publish(1, Gathered())
        assert [t.name for t in manifest.tensors] == ["w"]
        assert len(begun) == 1
        begun.clear()
        if manifest.transport == "broadcast":
            store: Any = stores.of("broadcast")
            assert [list(store._offer[1]), list(store._offer[1])] == [WEIGHTS, WEIGHTS], "and it can be read again"
            assert len(begun) == 2
        stores.close()


def test_engines_elsewhere_need_an_address_that_they_reach() -> None:
    far = [member(HERE), member(THERE)]
    near = stores_of(FleetConfig(), lambda: far, 10.0)
    with pytest.raises(WeightsError, match=r"cannot reach this trainer at 127\.0\.0\.1: set fleet\.weight_address"):
        near.publish(1, WEIGHTS)
    stores = stores_of(FleetConfig(weight_address="10.0.0.1"), lambda: far, 10.0)
    assert stores.publish(1, WEIGHTS).transport == "broadcast"
    stores.close()


def test_deltas_without_zstd_are_refused_before_engines_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delta.zstd.cache_clear()
    for package in ("backports.zstd", "compression.zstd"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WeightsError, match=r"pip install 'penstock\[delta\]', or use disk"):
        stores_of(FleetConfig(weight_transport="delta", weight_folder=tmp_path), list, 10.0)


@pytest.mark.parametrize(
    ("asked", "engines", "kept"), [(None, 1, True), (None, 2, False), (True, 2, True), (False, 1, False)]
)
def test_a_copy_is_kept_of_what_the_trainer_alone_has(*, asked: bool | None, engines: int, kept: bool) -> None:
    settings = FleetConfig(weight_transport="broadcast", weight_host_copy=asked)
    stores = stores_of(settings, lambda: [member(HERE)] * engines, 10.0)
    stores.commit(stores.publish(5, iter(WEIGHTS)))
    assert (stores.current is not None) == kept
    if stores.current is not None:
        assert (stores.current.version, stores.current.transport) == (5, "shared_memory")
        assert [(t.name, t.shape) for t in stores.current.tensors] == [("w", (3,))]
    stores.close()


def test_engines_of_other_hosts_cannot_have_a_copy_in_memory() -> None:
    settings = FleetConfig(weight_transport="broadcast", weight_address="10.0.0.1")
    stores = stores_of(settings, lambda: [member(THERE)], 10.0)
    stores.commit(stores.publish(5, as_named_tensors(lambda: WEIGHTS)))
    assert stores.current is stores.for_engine(member(THERE), 5) is None
    assert stores.for_engine(member(HERE), 5) is not None
    assert stores.current is not None
    assert stores.for_engine(member(THERE), 5) is None, "it waits for the next update, and is not refused"
    stores.close()


def test_tensors_that_were_changed_meanwhile_are_no_copy_of_what_was_sent() -> None:
    """Who cancels an update may step its optimizer; the update goes on, and an engine that returns took the copy."""
    stores = stores_of(FleetConfig(weight_transport="broadcast"), lambda: [member(HERE)], 10.0)
    changed = torch.arange(4.0)
    manifest = stores.publish(6, [("a", changed), ("b", torch.ones(2, 2))])
    changed[2] += 1e-3
    with pytest.raises(WeightsError, match="1 tensors, 'a' the first, are not those of weight version 6"):
        stores.commit(manifest)
    assert stores.current is None
    stores.close()


def test_a_trainer_that_hangs_as_it_is_asked_again_is_left_behind() -> None:
    stores = stores_of(FleetConfig(weight_transport="broadcast"), lambda: [member(HERE), member(HERE)], 0.01)
    go, first = threading.Event(), iter([WEIGHTS])
    stores.commit(stores.publish(3, as_named_tensors(lambda: next(first, None) or go.wait(WAIT_S))))
    try:
        with pytest.raises(WeightsError, match=r"named_tensors did not give version 3 again within 0\.02 s"):
            stores.for_engine(member(HERE), 3)
        assert stores.current is None
    finally:
        go.set()
    stores.close()


def test_a_module_that_gave_a_version_gives_the_same_again_or_nothing() -> None:
    stores = stores_of(FleetConfig(weight_transport="broadcast"), lambda: [member(HERE), member(HERE)], 10.0)
    module = torch.nn.Linear(2, 2)
    stores.commit(stores.publish(3, as_named_tensors(module)))
    assert stores.current is None
    assert stores.for_engine(member(HERE), 2) is None
    found = stores.for_engine(member(HERE), 3)
    assert found is not None
    assert found == stores.current
    assert (found.version, found.transport) == (3, "shared_memory")
    stores.commit(stores.publish(4, as_named_tensors(module.named_parameters)))
    module.weight.data += 1
    with pytest.raises(WeightsError, match="'weight' the first, are not those of weight version 4"):
        stores.for_engine(member(HERE), 4)
    stores.commit(stores.publish(5, list(module.named_parameters())))
    assert stores.for_engine(member(HERE), 5) is None, (
        "a list may have been changed in place since, and cannot be asked"
    )
    stores.close()
