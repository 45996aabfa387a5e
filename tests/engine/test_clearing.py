"""Caches are emptied while a worker in the core's own process only waits for its device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.vllm_plugin import clearing

pytestmark = pytest.mark.vllm


def test_a_worker_lets_the_core_clear_between_its_last_copy_and_its_wait(monkeypatch: pytest.MonkeyPatch):
    from penstock.engine.vllm_plugin.reload import Loader

    done: list[str] = []
    monkeypatch.setattr(clearing, "_waiting", [lambda: done.append("clear")])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("wait"))
    entries = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]

    def tensors(manifest: Any, place: Any) -> Any:
        assert (manifest.tensors, place) == (entries, plan.place)
        yield from ((entry, entry.name) for entry in entries)
        done.append("the source waits")

    loader = Loader(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: None)))
    plan: Any = SimpleNamespace(place=object(), put=lambda name, tensor: done.append(f"copy {name} {tensor}"))
    loader._plan = plan
    source: Any = SimpleNamespace(tensors=tensors, compares=True)
    manifest: Any = SimpleNamespace(tensors=entries)
    assert loader.load(manifest, source)
    assert done == ["copy a a", "copy b b", "clear", "the source waits", "wait"]


def test_the_worker_of_a_core_without_others_is_in_the_same_process():
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    for kind in (UniProcExecutor, MultiprocExecutor):
        core = SimpleNamespace(model_executor=kind.__new__(kind))
        assert clearing.worker_is_here(core) == (kind is UniProcExecutor)
