"""Mends of vLLM, each with what ends it. `install` puts them in place where an engine starts, others come with it."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.penstock")
"""Below vLLM's own, which alone has a handler in a worker."""


def install() -> None:
    """Patch the classes of this process; more than once is harmless."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - only inside vLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415 - only inside vLLM

    if not hasattr(MultiprocExecutor.collective_rpc, "__wrapped__"):
        MultiprocExecutor.collective_rpc = drain_worker_replies(MultiprocExecutor.collective_rpc)
    if not hasattr(EngineCore._reset_caches, "__wrapped__"):  # noqa: SLF001
        EngineCore._reset_caches = keep_image_cache(EngineCore._reset_caches)  # noqa: SLF001


# --- Replies of the workers of one core ------------------------------------------------------------------------------


def drain_worker_replies(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """`MultiprocExecutor.collective_rpc`, which reads every worker's reply before it raises what one of them says.

    vLLM reads the replies up to the first that is an error, or that is not there within the call's deadline. It takes
    those that it leaves for replies to the next call: after a misspelt method an update fails, and a late reply of the
    rank that brings the tokens ends the core. Here workers reply what went wrong and do not raise it, and all are
    waited for: they do nothing else before in any case, and the caller has a deadline of its own.

    vLLM's issue 49972 (0.26 to 0.33); needed until a release has its pull request 57846, or another that ends it.
    """

    @functools.wraps(collective_rpc)
    def call(
        executor: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **how: Any,
    ) -> Any:
        if how.get("non_block") or how.get("unique_reply_rank") is not None:  # a step: one rank answers
            return collective_rpc(executor, method, timeout, args, kwargs, **how)
        replies = collective_rpc(executor, functools.partial(reply, method), None, args, kwargs, **how)
        for ok, said in replies:
            if not ok:
                raise RuntimeError(
                    f"Worker failed with error '{said}', please check the stack trace above for the root cause"
                )
        return [pickle.loads(said) for _, said in replies]  # noqa: S301 - of our own worker, as vLLM reads it too

    return call


def reply(method: Any, worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    """On a worker: whether the call went well, and what it returned, pickled; else what went wrong.

    Pickled here, since what cannot be is an error that vLLM notices after this.
    """
    try:
        bound = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
        return True, pickle.dumps(bound(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        logger.exception("a worker's %s failed", method)
        return False, str(error)


# --- Replies of several cores ----------------------------------------------------------------------------------------


async def on_every_rank(engine: Any, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
    """Call a worker method on every rank of vLLM's `engine` (its AsyncLLM).

    Returns:
        Answers of shape `[dp * pp * tp]`: those of the first replica by rank, then those of the second, and so on.
    """
    collect_all_dp_replies(engine)
    return await engine.collective_rpc(method, args=args)


def collect_all_dp_replies(engine: Any) -> None:
    """Make the engine's `collective_rpc` return what every rank answered; again is harmless.

    vLLM's own calls all of them too, but of several data-parallel replicas it returns only what the first one answered
    (0.26 to 0.33: `DPLBAsyncMPClient.call_utility_async`). What went wrong on the others, and what weights they have,
    stays unknown.
    """
    client = engine.engine_core
    if len(getattr(client, "core_engines", ())) > 1:  # each the core of one replica
        client.collective_rpc_async = functools.partial(_of_all_cores, client)


async def _of_all_cores(
    client: Any,
    method: Any,
    timeout: float | None = None,  # noqa: ASYNC109 - as vLLM's
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    one = client._call_utility_async  # noqa: SLF001 - the public call keeps the first answer only
    calls = (one("collective_rpc", method, timeout, args, kwargs, engine=core) for core in client.core_engines)
    return [answer for of_replica in await asyncio.gather(*calls) for answer in of_replica]


# --- The cache of processed images -----------------------------------------------------------------------------------


def keep_image_cache(reset_caches: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore._reset_caches`, which ends every pause that clears, for those caches alone that depend on weights.

    vLLM's own also empties the receiving half of the cache of processed images. The sending half, in the API server,
    then goes on to send no more than the hash of an image that it has sent before, and the request fails: 0.26 has an
    assertion there, 0.32 an error that asks for a retry. Its pull request 43001 lets the API server empty its half as
    well, which a pause that comes past the API server cannot do. Nor is it in time where the pause waits for a step:
    what is sent meanwhile is in both halves, and emptied in one. Needed until no pause touches that cache.
    """

    @functools.wraps(reset_caches)
    def reset(core: Any, *args: Any, **kwargs: Any) -> Any:
        core.reset_mm_cache = lambda: None
        try:
            return reset_caches(core, *args, **kwargs)
        finally:
            del core.reset_mm_cache

    return reset
