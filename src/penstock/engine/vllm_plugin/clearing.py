"""Empties what an engine core caches of its weights while new ones are on their way.

To empty its KV cache vLLM takes every request that runs off it, block by block: 0.015 to 0.036 s of Python for 256 long
ones, where the weights of an 8B model need 0.05 s to come.

Where the worker has a process of its own, the core's has time, and clears in a thread. Where it is in the core's, a
thread would make it wait for Python's lock: 300 small calls of torch take 0.002 s, and beside a thread that computes
for 0.03 s they take 0.025. There the worker itself does it, when it has queued all of its work (`meanwhile`).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from penstock.errors import EngineError

_waiting: list[Callable[[], None]] = []
"""What the core in this process has to do."""


def meanwhile() -> None:
    """Do it, if there is something; for a worker that has nothing left to do but to wait for its device."""
    for work in _waiting:
        work()


@contextmanager
def caches_cleared(core: Any) -> Iterator[None]:
    """Clear the caches of one engine core that depend on weights, beside the body, in which workers load.

    The core must be paused, no step under way. What was in the cache of processed images stays (see `pausing`).

    Raises:
        EngineError: vLLM could not empty them; the core must not go on.
    """
    emptied: list[bool] = []

    def clear() -> None:
        if not emptied:
            emptied.append(core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    if worker_is_here(core):
        _waiting.append(clear)
        try:
            yield
        finally:
            _waiting.remove(clear)
        clear()
    elif core.scheduler.get_kv_connector() is not None:  # somebody else's code, which may mind what thread it runs in
        clear()
        yield
    else:
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-clear") as threads:
            cleared = threads.submit(clear)
            yield
        cleared.result()
    if not all(emptied):
        raise EngineError("vLLM could not empty its KV cache, or its connector's: the engine must be restarted")
    core.reset_encoder_cache()


def worker_is_here(core: Any) -> bool:
    """Whether what the core asks of its worker is done in the core's own thread."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: PLC0415 - only inside vLLM

    return isinstance(core.model_executor, UniProcExecutor)
