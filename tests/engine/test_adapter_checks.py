"""How an engine reads an adapter before it loads it, and what it refuses of one."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import WeightsError
from penstock.plugin.adapters import CoreAdapters, check_adapter

MODULE = "model.layers.0.self_attn.q_proj"
SPEC: Any = SimpleNamespace(shapes={f"{MODULE}.weight": (6, 4)})
A, B = f"base_model.model.{MODULE}.lora_A.weight", f"base_model.model.{MODULE}.lora_B.weight"


def saved(folder: Path, rank: int = 2, *left_out: str) -> Path:
    tensors = {A: torch.ones(rank, 4), B: torch.ones(6, rank)}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in left_out}, folder / "adapter_model.safetensors"
    )
    return folder / "adapter_model.safetensors"


@pytest.mark.parametrize("by", ["file", "path"])
def test_a_rank_that_the_configuration_does_not_name_is_refused(tmp_path: Path, by: str) -> None:
    """Otherwise it would be served with the factor alpha / r of another rank."""

    def source(config: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return {"path": str(tmp_path)} if by == "path" else {"file": str(saved(tmp_path)), "config": config}

    saved(tmp_path)
    check_adapter(source({"r": 2}), SPEC)
    check_adapter(source({"r": 16, "rank_pattern": {"q_proj": 2}}), SPEC)
    with pytest.raises(WeightsError, match=r"lora_A.weight' has shape \(2, 4\), and its configuration says r=16"):
        check_adapter(source({"r": 16}), SPEC)


@pytest.mark.parametrize("left_out", [A, B])
def test_half_of_a_matrix_is_refused(tmp_path: Path, left_out: str) -> None:
    with pytest.raises(WeightsError, match=f"has one of lora_A and lora_B for '{MODULE}', and not both"):
        check_adapter({"file": str(saved(tmp_path, 2, left_out)), "config": {"r": 2}}, SPEC)


class Worker:
    """A worker of another process than the core, as far as reads need one; each read waits for its event."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.release = {name: threading.Event() for name in ("x", "y", "hub")}
        self.begun: queue.Queue[str] = queue.Queue()
        manager = SimpleNamespace(penstock_sources={}, penstock_ahead={}, penstock_next=None, penstock_read=self.read)
        manager.penstock_reading = threading.Lock()
        self.model_runner = SimpleNamespace(lora_manager=manager)

    def read(self, name: str, _source: Any) -> str:
        self.begun.put(name)
        assert self.release[name].wait(60.0)
        return name


def test_files_are_read_in_turn_and_each_read_ends_by_its_own_event(tmp_path: Path) -> None:
    workers = [Worker(), Worker()]

    def rpc(method: Callable[..., bool], args: tuple[Any]) -> list[bool]:
        return [method(worker, *args) for worker in workers]

    def in_core(work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    control: Any = SimpleNamespace(
        core=SimpleNamespace(penstock_rpc=rpc, add_request=None), in_core=in_core, known_spec=lambda: SPEC
    )
    core = CoreAdapters(control)
    source = str(saved(tmp_path)), {"r": 2}
    orders = {name: {"name": name, "source": {"file": source[0], "config": source[1], "key": name}} for name in "xy"}
    orders["hub"] = {"name": "hub", "source": {"path": "somebody/adapter", "key": "hub"}}
    with ThreadPoolExecutor() as threads:
        reads = {}
        for name in ("x", "y", "hub"):  # y waits for x, and what may come over a network for nobody
            reads[name] = threads.submit(core.read, orders[name])
            if name != "y":
                assert [worker.begun.get(timeout=60.0) for worker in workers] == [name] * 2
        again = threads.submit(core.read, orders["y"])
        workers[0].release["x"].set()
        assert workers[0].begun.get(timeout=60.0) == "y"
        assert not any(read.done() for read in reads.values()), "the other worker reads on"
        workers[1].release["x"].set()
        reads["x"].result(60.0)
        assert not reads["y"].done()
        for worker in workers:
            worker.release["y"].set()
        assert reads["y"].result(60.0) == again.result(60.0) == {"ok": True}
        assert workers[1].begun.get(timeout=60.0) == "y"
        assert not reads["hub"].done()
        for worker in workers:
            worker.release["hub"].set()
        reads["hub"].result(60.0)
    assert all(worker.begun.empty() for worker in workers), "nothing is read twice"
    bad = {"name": "z", "source": {"file": source[0], "config": {"r": 3}, "key": "z"}}
    for _ in range(2):
        with pytest.raises(WeightsError, match="says r=3"):
            core.read(bad)
