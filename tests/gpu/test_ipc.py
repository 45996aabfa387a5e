"""CUDA IPC between two processes on one GPU: what arrives, how fast, and that nothing is left."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import WeightsError
from penstock.weights.checksum import device_sums
from penstock.weights.cuda_ipc import CudaIpcStore, IpcSource
from penstock.weights.manifest import WeightManifest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIB = 2**20


def worker(connection: Any, device: str) -> None:
    """An engine's worker: it prepares and loads what it is told, and answers with sums of what it has in force."""
    torch.cuda.set_device(device)
    source = IpcSource(torch.device(device))
    live: dict[str, torch.Tensor] = {}
    while (asked := connection.recv()) is not None:
        what, data = asked
        manifest = WeightManifest.from_json(data)
        began = time.perf_counter()
        try:
            if what == "prepare":
                source.prepare(manifest)
                answer: Any = time.perf_counter() - began
            else:
                for entry, tensor in source.tensors(manifest, lambda _: None):
                    if entry.name in live:
                        live[entry.name].copy_(tensor)
                    else:
                        live[entry.name] = tensor.clone()
                torch.cuda.synchronize()
                answer = (time.perf_counter() - began, device_sums(live.values()))
        except WeightsError as error:
            answer = str(error)
        connection.send(answer)


class Engine:
    def __init__(self, device: str = "cuda:0") -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=worker, args=(theirs, device), daemon=True)
        self._process.start()

    def ask(self, what: str, manifest: WeightManifest) -> Any:
        self._ours.send((what, manifest.to_json()))
        assert self._ours.poll(120), "no answer"
        return self._ours.recv()

    def stop(self) -> None:
        self._ours.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def store() -> Iterator[CudaIpcStore]:
    store = CudaIpcStore()
    yield store
    store.close()


def tensors() -> dict[str, torch.Tensor]:
    return {
        "big": torch.randn(48 * MIB, dtype=torch.bfloat16, device="cuda").view(-1, 4096),
        "part": torch.randn(64, 64, device="cuda")[16:32],  # contiguous, in the middle of another
        "turned": torch.randn(64, 32, device="cuda").t(),
        "host": torch.randn(33, dtype=torch.float64),
        "small": torch.randn((), device="cuda"),
        "empty": torch.empty(0, 5, device="cuda"),
        "quantized": torch.randn(1000, device="cuda").to(torch.float8_e4m3fn),
    }


def test_fifty_rounds_in_place_arrive_and_nothing_grows(engine: Engine, store: CudaIpcStore) -> None:
    weights = tensors()
    free: list[int] = []
    for version in range(1, 51):
        for tensor in weights.values():
            if tensor.element_size() > 1:
                tensor.mul_(1.01)
        manifest = store.publish(version, weights.items())
        assert isinstance(engine.ask("prepare", manifest), float)
        seconds, sums = engine.ask("load", manifest)
        assert sums == [entry.checksum for entry in manifest.tensors] == [int(n) for n in map(by_cpu, weights.values())]
        free.append(torch.cuda.mem_get_info()[0])
        assert seconds < 1
    assert min(free[5:]) >= free[4] - 8 * MIB
    assert len(list(Path("/proc/self/fd").iterdir())) < 200


def by_cpu(tensor: torch.Tensor) -> int:
    return device_sums([tensor.cpu()])[0]


def test_two_engines_map_one_trainer_and_its_memory_is_free_after_close(engine: Engine) -> None:
    other = Engine()

    def lend() -> WeightManifest:
        """A GiB is shown, mapped by both and taken back."""
        store, weights = CudaIpcStore(), {"w": torch.ones(256 * MIB, device="cuda")}
        manifest = store.publish(1, weights.items())
        for each in (engine, other):
            assert isinstance(each.ask("prepare", manifest), float)
        store.close()
        return manifest

    try:
        lend()
        torch.cuda.empty_cache()
        # Each context keeps what its kernels have once needed: 233 MiB of local memory for one that sums so much.
        before = settled()
        manifest = lend()
        torch.cuda.empty_cache()
        assert settled(until=before - 64 * MIB) >= before - 64 * MIB
        assert "lends" in engine.ask("prepare", manifest)
    finally:
        other.stop()


def settled(until: int | None = None) -> int:
    """Free bytes of the GPU once they are as many as `until`, or do not change for a second; after 20 s, what is."""
    deadline, before = time.monotonic() + 20, -1
    while time.monotonic() < deadline:
        free = torch.cuda.mem_get_info()[0]
        if free >= until if until is not None else free == before:
            return free
        before = free
        time.sleep(1)
    return before


def test_a_tensor_that_changes_after_it_was_published_is_refused(engine: Engine, store: CudaIpcStore) -> None:
    weights = tensors()
    manifest = store.publish(1, weights.items())
    weights["big"][5, 5] += 1
    torch.cuda.synchronize()
    assert "'big' has the sum" in engine.ask("prepare", manifest)


def test_nan_and_another_gpu_are_refused(engine: Engine, store: CudaIpcStore) -> None:
    weights = tensors()
    manifest = store.publish(1, weights.items())
    elsewhere = WeightManifest(1, "cuda_ipc", {"GPU-of-nobody": "{}"}, manifest.tensors)
    assert "GPU-of-nobody" in engine.ask("prepare", elsewhere)
    weights["part"][0, 0] = float("nan")
    with pytest.raises(WeightsError, match="'part' holds NaN"):
        store.publish(2, weights.items())


def test_expandable_segments_are_refused() -> None:
    code = (
        "import torch; from penstock.weights.cuda_ipc import CudaIpcStore\n"
        "CudaIpcStore().publish(1, [('w', torch.ones(4096, 4096, device='cuda'))])"
    )
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "expandable segments" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_two_gpus_each_read_their_own() -> None:
    store = CudaIpcStore(("cuda:0", "cuda:1"))
    engines = Engine("cuda:0"), Engine("cuda:1")
    try:
        manifest = store.publish(1, tensors().items())
        for engine in engines:
            assert isinstance(engine.ask("prepare", manifest), float)
            assert engine.ask("load", manifest)[1] == [entry.checksum for entry in manifest.tensors]
    finally:
        store.close()
        for engine in engines:
            engine.stop()


def test_eight_gigabytes_load_at_the_speed_of_a_copy(engine: Engine, store: CudaIpcStore) -> None:
    weights = {f"layer{i}": torch.randn(2**26, device="cuda").to(torch.bfloat16) for i in range(64)}
    for version in range(1, 4):
        prepared = engine.ask("prepare", manifest := store.publish(version, weights.items()))
        seconds, _ = engine.ask("load", manifest)
        print(f"{manifest.nbytes / 1e9:.1f} GB: prepare {prepared:.4f} s, load {seconds:.4f} s")
    assert seconds < 0.06
