"""Empties what an engine core caches of its weights while new ones are on their way.

To empty its KV cache vLLM takes every request that runs off it, block by block: up to 0.04 s of Python for 256 long
ones, where the weights of an 8B model need 0.05 s to come. The one is the core's work, the other is the workers'.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from penstock.errors import EngineError


@contextmanager
def caches_cleared(core: Any) -> Iterator[None]:
    """Clear the caches of one engine core that depend on weights, in a thread while the body runs.

    The core must be paused, no step under way; the body must leave its scheduler alone. What was in the cache of
    processed images stays (see `pausing`).

    Raises:
        EngineError: vLLM could not empty them; the core must not go on.
    """
    if core.scheduler.get_kv_connector() is not None:  # somebody else's code, which may mind what thread it runs in
        core._reset_caches()  # noqa: SLF001
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-clear") as threads:
        emptied = threads.submit(core.reset_prefix_cache, reset_running_requests=True, reset_connector=False)
        yield
    if not emptied.result():
        raise EngineError("vLLM could not empty its KV cache, although no request holds any: restart the engine")
    core.reset_encoder_cache()
