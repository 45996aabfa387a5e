"""What every worker answers to a call is read, so that none of it is taken for an answer to the next call.

Of several workers vLLM (0.26 to 0.32: `MultiprocExecutor.collective_rpc`) reads the answers up to the first that is an
error, or that is not there within the call's deadline. Those that it leaves are what the next call reads: after a
misspelt method an update fails, and a late answer of the rank that brings the tokens is taken for a step's, of which
the core ends. Here workers answer what went wrong and do not raise it, and all are waited for: they do nothing else
before in any case, and who asked has a deadline of its own.

vLLM's issue 49972; needed until a release has its pull request 57846, or another that ends it.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.penstock")
"""Below vLLM's own, which alone has a handler in a worker."""


def install() -> None:
    """Hang into the executor of several workers; more than once is harmless."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415 - only inside vLLM

    if not hasattr(MultiprocExecutor.collective_rpc, "__wrapped__"):
        MultiprocExecutor.collective_rpc = of_all(MultiprocExecutor.collective_rpc)


def of_all(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """`MultiprocExecutor.collective_rpc`, which reads all answers before it raises what one of them says."""

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
        answers = collective_rpc(executor, functools.partial(answer, method), None, args, kwargs, **how)
        for ok, said in answers:
            if not ok:
                raise RuntimeError(
                    f"Worker failed with error '{said}', please check the stack trace above for the root cause"
                )
        return [pickle.loads(said) for _, said in answers]  # noqa: S301 - of our own worker, as vLLM reads it too

    return call


def answer(method: Any, worker: Any, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    """On a worker: whether the call went well, and what it returned, pickled; else what went wrong.

    Pickled here, since what cannot be is an error that vLLM notices after this.
    """
    try:
        bound = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
        return True, pickle.dumps(bound(*args, **kwargs), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        logger.exception("a worker's %s failed", method)
        return False, str(error)
