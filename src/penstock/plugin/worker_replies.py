"""Repairs of calls to workers: every reply is read, and a reply that cannot be sent on is an error."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

from penstock.plugin import attempt
from penstock.plugin.core import control_of


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


def sendable(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    """Make `EngineCore.collective_rpc` fail if its result cannot be sent, which would end vLLM's output thread."""
    from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult  # noqa: PLC0415 - only inside vLLM

    @functools.wraps(collective_rpc)  # vLLM reads the signature
    def call(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        control_of(core).count_foreign(method)
        results = collective_rpc(core, method, *args, **kwargs)
        _, error = attempt(lambda: MsgpackEncoder().encode(UtilityResult(results)), f"sending what {method!r} returned")
        if error is not None:
            raise TypeError(f"what {method!r} returns cannot be sent to another process: {error}") from error
        return results

    return call
