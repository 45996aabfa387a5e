"""What a worker of vLLM does for us, and what it answers if that fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from penstock.weights.manifest import WeightManifest

pytestmark = pytest.mark.vllm

MANIFEST = WeightManifest(4, "shared_memory", {"path": "/nowhere"}, ())
GROUP = {
    "address": "127.0.0.1", "port": 1, "world_size": 2, "rank_offset": 1, "epoch": "a", "backend": "tcp", "key": "k",
    "timeout_s": 1.0,
}  # fmt: skip


class Failing:
    """A source, a loader and a model."""

    def __init__(self, *_args: Any) -> None:
        raise RuntimeError("out of memory")

    @classmethod
    def made(cls) -> Any:
        def fail(*_args: Any) -> None:
            raise RuntimeError("out of memory")

        return SimpleNamespace(prepare=fail, load=fail)


def worker(**given: Any) -> Any:
    from penstock.plugin.worker import WorkerExtension

    made = WorkerExtension()
    made.__dict__.update(given)
    return made


def test_what_cannot_be_prepared_is_refused_by_its_name() -> None:
    failing = worker(_penstock_sources={"shared_memory": Failing.made()})
    assert failing.penstock_prepare(MANIFEST.to_json()) == "RuntimeError: out of memory"
    assert failing.penstock_prepared() is None


@pytest.mark.parametrize("loads", [False, True])
def test_what_cannot_be_loaded_is_told_from_what_did_not_come(loads: bool) -> None:  # noqa: FBT001
    """The second is sent again; after the first the engine ends."""
    loader = SimpleNamespace(load=lambda *_: False) if loads else Failing.made()
    failing = worker(
        _penstock_manifest=MANIFEST,
        _penstock_sources={"shared_memory": None},
        _penstock_loader=loader,
        model_runner=SimpleNamespace(get_model=Failing),
    )
    assert failing.penstock_load(4) == {"fault": "RuntimeError: out of memory"}
    assert failing.penstock_load(5) == {"error": "weight version 5 is not prepared here"}


def test_a_group_that_cannot_be_joined_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.weights import group

    monkeypatch.setattr(group, "Group", Failing)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    joining = worker(device="cpu", vllm_config=SimpleNamespace(parallel_config=parallel))
    assert joining.penstock_join_group(GROUP) == "RuntimeError: out of memory"


def test_what_sums_weights_on_a_gpu_is_compiled_beside_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.weights import transfer as module

    compiled, may, ended = list[torch.device](), threading.Event(), threading.Event()

    def compile_(device: torch.device) -> None:
        may.wait(60)
        compiled.append(device)
        ended.set()

    monkeypatch.setattr(module, "warm_up", compile_)
    worker(device=torch.device("cpu")).penstock_warm_up()
    worker(device=torch.device("cuda:1")).penstock_warm_up()
    assert compiled == []
    may.set()
    assert ended.wait(60)
    assert compiled == [torch.device("cuda:1")]


def test_a_worker_clears_what_a_sleep_dropped_and_lets_adapters_be_copied_again() -> None:
    from vllm.v1.serial_utils import run_method

    from penstock.plugin.sleeping import clear_dropped

    model, gone = torch.nn.Linear(2, 2), list[int]()
    adapters = SimpleNamespace(lora_index_to_id=[None, 5], deactivate_adapter=gone.append, _last_mapping="a table")
    runner = SimpleNamespace(get_model=lambda: model, lora_manager=SimpleNamespace(_adapter_manager=adapters))
    # As the call goes to a worker in a process of its own.
    run_method(worker(model_runner=runner), cloudpickle.dumps(clear_dropped), (), {})
    assert not any(parameter.any() for parameter in model.parameters())
    assert (gone, adapters._last_mapping) == ([5], None)
