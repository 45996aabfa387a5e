"""Updates after which requests in flight keep their KV, and new requests reuse nothing of older weights.

In the engine core, a request's `cache_salt` names the weights that were in force when it last looked for cached KV. So
whatever an older request computes, before the update or after, lies under a salt that no new request has. A request
that has no KV, because it waits or was preempted, gets the salt in force as it looks; what it has is computed anew.

The core tells the API server which requests keep KV, and when one computes anew, by marks among its outputs: they are
in order with the tokens. vLLM (0.26 to 0.33) has no extension point for this; the salt itself is one.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable
from typing import Any

from penstock.errors import StateError
from penstock.plugin.compat import send_mark
from penstock.plugin.salt import Salting
from penstock.wire import Notes

MARK = "penstock-kv-kept:"
"""Begins the id of an output that belongs to no request: JSON of `[kept, request ids]` follows."""


# --- in the core's process -------------------------------------------------------------------------------------------


class KeptKV:
    """Salts and kept requests of one engine core; methods run in the core's thread, between two steps."""

    def __init__(self, core: Any, salting: Salting) -> None:
        self._core = core
        self._salting = salting
        self.version: int | None = None
        """Of the last update that kept KV in flight: the salt in force."""
        self._kept: set[str] = set()
        """Requests with KV of older weights, as far as the API server was told."""

    def check(self) -> None:
        """Raise StateError where KV leaves the engine: it would come back under other weights."""
        if (connector := getattr(self._core.scheduler, "connector", None)) is not None:
            raise StateError(
                f"the KV connector {type(connector).__name__} shares KV outside of the engine, so requests in flight "
                "alone cannot keep theirs; update with kv='recompute'"
            )

    def keep_in_flight(self, version: int) -> int:
        """Let requests that are making tokens keep their KV; return how many. The core is paused, no step under way.

        The others give up what they have: of a prompt that is half computed nobody could say which weights made what.
        """
        scheduler = self._core.scheduler
        self._salting.install()
        self.version = version
        for request in [one for one in reversed(scheduler.running) if not _makes_tokens(one)]:
            scheduler.running.remove(request)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001 - as vLLM's reset of all
        self._core.reset_encoder_cache()
        kept = {name for name, request in scheduler.requests.items() if request.num_computed_tokens}
        self._tell(kept - self._kept, kept=True)
        self._kept = (self._kept & scheduler.requests.keys()) | kept
        return len(kept)

    def before_output(self, scheduled: Any) -> None:
        """Tell of kept requests that this step has begun to compute anew; called before its outputs are sent."""
        if self._kept:
            # A resumed request is among the new ones in vLLM's second model runner.
            begun = {*scheduled.scheduled_cached_reqs.resumed_req_ids}
            begun.update(new.req_id for new in scheduled.scheduled_new_reqs)
            self._tell(self._kept & begun, kept=False)
            self._kept -= begun

    def _tell(self, requests: Iterable[str], *, kept: bool) -> None:
        if names := sorted(requests):
            send_mark(self._core, MARK + json.dumps([kept, names]))


def _makes_tokens(request: Any) -> bool:
    """All its tokens have KV but the last one, which this engine made."""
    return request.num_output_tokens > 0 and request.num_computed_tokens >= request.num_tokens - 1


# --- in the API server's process -------------------------------------------------------------------------------------


class KeptRequests:
    """The requests of one API server that have KV of older weights."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def install(self, processor: Any) -> None:
        """Read the marks among the outputs that vLLM's OutputProcessor gets."""
        processor.process_outputs = functools.partial(self._process, processor, processor.process_outputs)

    def notes(self, request_id: str) -> Notes | None:
        """What its newest tokens have to say."""
        return {"kv_kept": True} if request_id in self._names else None

    def _process(self, processor: Any, process_outputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(outputs) == 1 and outputs[0].request_id.startswith(MARK):
            kept, names = json.loads(outputs[0].request_id.removeprefix(MARK))
            if kept:
                self._names = {name for name in (*self._names, *names) if name in processor.request_states}
            else:
                self._names.difference_update(names)
        return process_outputs(outputs, *args, **kwargs)
