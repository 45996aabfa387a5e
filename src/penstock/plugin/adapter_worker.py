"""LoRA adapters on a worker: read ahead in threads, put in force between steps, reread after vLLM drops one."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from penstock.errors import WeightsError
from penstock.plugin import attempt
from penstock.plugin.core import settle

PLACE = "penstock-adapter:"
"""Prefix of the path in vLLM's LoRARequest for an adapter that Penstock loaded. The worker knows its source."""
READ_S = 60.0
"""Deadline in seconds of a read during generation."""
MOST_AHEAD = 16
"""Largest number of adapters read ahead but not yet in force. With more, the oldest must be read again."""


def load_adapter(worker: Any, order: Mapping[str, Any]) -> None:
    """Load an adapter on a worker, replacing its older version. No step may run.

    Raises:
        WeightsError: the engine takes no adapters, or vLLM refuses this one. The older version stays.
    """
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and only needed with adapters

    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise WeightsError("the engine takes no adapters; launch it with enable_lora=true")
    sources, number = _sources(manager), order["id"]
    before = sources.get(number)
    request = LoRARequest(order["name"], number, PLACE + order["name"], load_inplace=True)
    sources[number] = order["source"]
    manager.penstock_next = manager.penstock_ahead.pop(order["source"]["key"], None)
    _, error = attempt(lambda: manager.add_adapter(request), f"loading adapter {order['name']!r}")
    if error is not None:
        if before is None:
            del sources[number]
            manager.remove_adapter(number)
        else:  # the older version may be gone already
            sources[number] = before
            manager.add_adapter(request)
        raise WeightsError(f"adapter {order['name']!r} cannot be loaded: {error}") from error


def put_in_force(worker: Any, order: Mapping[str, Any]) -> str | None:
    """Load an adapter as `load_adapter`. Return the reason if that fails: vLLM would end the engine."""
    error = attempt(lambda: load_adapter(worker, order), "loading an adapter")[1]
    if error is None:
        return None
    return str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"


def read_ahead(worker: Any, order: Mapping[str, Any]) -> bool:
    """Start to read an adapter in a thread, once, for a later `load_adapter`.

    Returns:
        Whether the end of the read will be written, as one byte, to the pipe `done`. Only workers on the core's host do
        this. `load_adapter` waits for the others.
    """
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        return False  # `load_adapter` refuses it
    _sources(manager)
    ahead, key = manager.penstock_ahead, order["source"]["key"]

    def work() -> Any:
        if worker.device.type != "cpu":  # with more threads, each of hundreds of small tensors waits for all of them
            torch.set_num_threads(1)
        # In parallel, reads of files would delay each other, and the first would be ready as late as the last.
        with manager.penstock_reading if "file" in order["source"] else nullcontext():
            return manager.penstock_read(order["name"], order["source"])

    def say_so(_: Future[Any]) -> None:
        with suppress(OSError):  # the core has stopped waiting
            end = os.open(order["done"], os.O_WRONLY | os.O_NONBLOCK)
            os.write(end, b"1")
            os.close(end)

    if key not in ahead:
        ahead[key] = read = Future[Any]()
        while len(ahead) > MOST_AHEAD:  # their callers have left
            del ahead[next(iter(ahead))]
        threading.Thread(target=settle, args=(read, work), name="penstock-adapter", daemon=True).start()
    ahead[key].add_done_callback(say_so)
    return Path(order["done"]).is_fifo()


def unload_adapter(worker: Any, number: int) -> None:
    """Forget an adapter on a worker."""
    manager = worker.model_runner.lora_manager
    manager.remove_adapter(number)
    _sources(manager).pop(number, None)


def copy_again(worker: Any) -> None:
    """Let LoRA adapters be copied again when used, although vLLM thinks them active."""
    manager = worker.model_runner.lora_manager._adapter_manager  # noqa: SLF001 - vLLM has no call that only frees slots
    for adapter in [adapter for adapter in manager.lora_index_to_id if adapter is not None]:
        manager.deactivate_adapter(adapter)
    manager._last_mapping = None  # noqa: SLF001 - the device's own table of slots is gone


def _sources(manager: Any) -> dict[int, Mapping[str, Any]]:
    """Return the sources of our adapters, by vLLM's number.

    If there are more than `max_cpu_loras`, vLLM drops the least used adapters. It reads a dropped adapter again when a
    request needs it. vLLM has no extension point for reading, so `_load_adapter` is patched (0.26 to 0.33).
    """
    if not hasattr(manager, "penstock_sources"):
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow, and only needed with adapters

        load, sources = manager._load_adapter, {}  # noqa: SLF001
        for known in (manager._lora_model_cls, type(manager._adapter_manager)):  # noqa: SLF001
            _leave_unpinned(sys.modules[known.__module__])

        def read(name: str, source: Mapping[str, Any]) -> Any:
            with read_from(source) as path:
                adapter = load(LoRARequest(name, 1, path))  # its number is known once it is put in force
            if not any(".experts" in module for module in adapter.loras):  # expert adapters must not be packed twice
                manager._adapter_manager._create_merged_loras_inplace(adapter)  # noqa: SLF001
            _pin(adapter)
            return adapter

        def load_from_source(request: Any) -> Any:
            if not request.lora_path.startswith(PLACE):
                sources.pop(request.lora_int_id, None)  # another client has replaced this adapter with its own
                return load(request)
            ready, manager.penstock_next = manager.penstock_next, None
            number = request.lora_int_id
            adapter = read(request.lora_name, sources[number]) if ready is None else ready.result(READ_S)
            adapter.id = number
            return adapter

        manager._load_adapter = load_from_source  # noqa: SLF001
        manager.penstock_sources, manager.penstock_read = sources, read
        manager.penstock_ahead, manager.penstock_next = {}, None
        manager.penstock_reading = threading.Lock()
    return manager.penstock_sources


def _leave_unpinned(module: Any) -> None:
    """Stop a module of vLLM's adapters from pinning each tensor of an adapter."""
    module.PIN_MEMORY = False


def _pin(adapter: Any) -> None:
    """Copy an adapter's tensors into one piece of memory that a GPU reads itself.

    vLLM (0.26 to 0.33) pins each of hundreds of tensors by a driver call, which other processes on the GPU delay.
    """
    halves = [(part, half) for part in adapter.loras.values() for half in ("lora_a", "lora_b")]
    lists = [each if isinstance(each := getattr(part, half), list) else [each] for part, half in halves]
    tensors = [tensor for each in lists for tensor in each if tensor is not None]
    if not torch.cuda.is_available() or len({tensor.dtype for tensor in tensors}) != 1:
        return
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    pieces = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    for (part, half), each in zip(halves, lists, strict=True):
        pinned = [None if tensor is None else next(pieces).view(tensor.shape) for tensor in each]
        setattr(part, half, pinned if isinstance(getattr(part, half), list) else pinned[0])


@contextmanager
def read_from(source: Mapping[str, Any]) -> Generator[str]:
    """Yield the folder from which vLLM reads an adapter: made for `{"file", "config"}`, or given by `{"path"}`."""
    if "file" not in source:
        yield source["path"]
        return
    with tempfile.TemporaryDirectory(prefix="penstock-adapter-") as folder:
        Path(folder, "adapter_model.safetensors").symlink_to(source["file"])
        Path(folder, "adapter_config.json").write_text(json.dumps(source["config"]))
        yield folder


# --- Repairs of vLLM's LoRA on CPUs -----------------------------------------------------------------------------------


def mend() -> None:
    """Patch the classes of this process. A second call is harmless."""
    from vllm.lora.ops import torch_ops  # noqa: PLC0415 - only inside vLLM
    from vllm.lora.ops.torch_ops import lora_ops  # noqa: PLC0415

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        if not hasattr(op := getattr(torch_ops, name), "__wrapped__"):
            for module in (torch_ops, lora_ops):  # the name that is imported, and the name that other operations call
                setattr(module, name, spare_base_tokens(op))
    from vllm.platforms import current_platform  # noqa: PLC0415 - only inside vLLM
    from vllm.v1.kv_cache_interface import KVCacheConfig  # noqa: PLC0415

    if current_platform.is_cpu():
        KVCacheConfig.needs_kv_cache_zeroing = ZEROED  # pyright: ignore[reportAttributeAccessIssue] - vLLM's property


def spare_base_tokens(op: Callable[..., None]) -> Callable[..., None]:
    """Make an operation of vLLM's CPU LoRA leave tokens without adapters unchanged.

    Their index is -1, which selects the last adapter. A request of the base model that shares a step with an adapter's
    request then gets another tenant's adapter. See vLLM's pull requests 48421 and 49656 (0.26 to 0.33). Needed until a
    release has one of them. GPUs have other operations, which skip such tokens.
    """

    @functools.wraps(op)
    def call(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        op(inputs.where((indices != -1).unsqueeze(1), 0), weights, output, indices, *args, **kwargs)

    return call


# --- KV of a request that overflowed ---------------------------------------------------------------------------------

ZEROED = property(lambda _: True)
"""`KVCacheConfig.needs_kv_cache_zeroing`: vLLM's own switch, which zeroes each block before a request gets it.

An adapter with large weights leaves NaN and infinity in KV blocks. The CPU kernel multiplies the unused places of a
block by 0, and 0 times NaN is NaN. So the next request in such a block, of any tenant, gets wrong tokens. vLLM turns
the switch on only for Mamba layers (0.26 to 0.33). Needed until the kernel skips unused places.
"""
