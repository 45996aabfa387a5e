"""Repairs of vLLM, each with the condition that ends it. `install` applies them when an engine starts."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.rooms import plugged_in

logger = logging.getLogger("vllm.penstock")
"""A child of vLLM's logger, the only one with a handler in a worker."""


def install() -> None:
    """Patch the classes of this process. A second call is harmless."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415 - only inside vLLM

    if not hasattr(MultiprocExecutor.collective_rpc, "__wrapped__"):
        MultiprocExecutor.collective_rpc = drain_worker_replies(MultiprocExecutor.collective_rpc)
    # An engine may also have fixed adapters. Its cores and workers inherit its arguments.
    if takes_adapters() or any(option.replace("_", "-").startswith("--enable-lora") for option in sys.argv):
        plugged_in("adapters.mends")()


def takes_adapters() -> bool:
    """Whether vLLM allows adapters to come at run time, as in `vllm.envs`."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in {"1", "true"}


def attempt(work: Callable[[], Any], what: str) -> tuple[Any, Exception | None]:
    """Call `work`. Return its result, or its error for another thread or process.

    vLLM passes on only the text of an error, or ends the process. An error that is not ours is logged here.
    """
    try:
        return work(), None
    except Exception as error:
        if not isinstance(error, PenstockError):
            logger.exception("%s failed", what)
        return None, error


# --- Replies of the workers of one core ------------------------------------------------------------------------------


def drain_worker_replies(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """Make `MultiprocExecutor.collective_rpc` drain all replies before an error.

    vLLM stops reading at the first error or deadline, and then reads a leftover reply as the answer to the next call.
    Here workers reply with errors instead of raising them, and all replies are awaited. Workers do nothing else anyway.

    vLLM's issue 49972 (0.26 to 0.33). Needed until a release has its pull request 57846, or another fix.
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
        if how.get("non_block") or how.get("unique_reply_rank") is not None:  # a step: only one rank answers
            return collective_rpc(executor, method, timeout, args, kwargs, **how)
        replies = collective_rpc(executor, functools.partial(reply, method), None, args, kwargs, **how)
        for result, error in replies:
            if result is None:
                raise RuntimeError(
                    f"Worker failed with error '{error}', please check the stack trace above for the root cause"
                )
        return [pickle.loads(result) for result, _ in replies]  # noqa: S301 - from our own worker, as in vLLM

    return call


def reply(method: Any, worker: Any, *args: Any, **kwargs: Any) -> tuple[bytes | None, str]:
    """Call a worker's method. Return the pickled result, or the error's text."""

    def work() -> bytes:
        bound = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
        return pickle.dumps(bound(*args, **kwargs), pickle.HIGHEST_PROTOCOL)  # fails here, not when vLLM sends it

    result, error = attempt(work, f"a worker's {method}")
    return result, str(error)
