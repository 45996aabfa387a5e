"""Updates after which requests in flight keep their KV, and new requests reuse no KV of older weights.

vLLM looks up cached prefixes by tokens, by a request's `cache_salt` and, for an adapter, by its name and path. It does
not know versions, so KV outlives the weights that made it. In the engine core, a request's `cache_salt` names the
weights that were in force at its last lookup of cached KV. So everything that an older request computes, before or
after the update, has a salt that no new request has. A request without KV, because it waits or was preempted, gets the
salt in force at its lookup, and its tokens are recomputed.

The core tells the API server by marks among its outputs which requests keep KV, and when one of them is recomputed. The
marks are in order with the tokens. vLLM (0.26 to 0.33) has no extension point for this, except the salt itself.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.errors import StateError
from penstock.plugin.marks import send_mark


def salt_of(
    caller_salt: str | None, weights_version: int | None, adapter: str | None, adapter_version: int | None
) -> str | None:
    """Return the `cache_salt` of a request. Equal salts share cached prefixes.

    It differs if any argument differs. It is the caller's own salt if no version counts: neither that of the base
    weights nor that of the request's adapter.
    """
    if weights_version is None and adapter_version is None:
        return caller_salt
    named = json.dumps([weights_version, adapter, adapter_version, caller_salt])
    # A digest, because KV stores outside the engine make keys and paths of it, and adapters have arbitrary names.
    return hashlib.sha256(named.encode()).hexdigest()


class KeptKV:
    """Salts and kept requests of one engine core. By default, methods run in its thread between two steps.

    `load_of` returns the load that brought a LoRARequest's adapter, in any thread.
    """

    def __init__(self, core: Any, load_of: Callable[[Any], int | None]) -> None:
        self.version: int | None = None
        """Version of the last update that kept KV in flight: the salt in force."""
        self._core = core
        self._load_of = load_of
        self._salts = False
        self._kept: set[str] = set()
        """Requests with KV of older weights, as last reported to the API server."""

    def salt(self) -> None:
        """Salt every request from now on with the versions in force at its KV lookup. A second call is harmless."""
        if not self._salts:
            self._salts = True
            manager, core = self._core.scheduler.kv_cache_manager, self._core
            manager.get_computed_blocks = functools.partial(self._look_up, manager.get_computed_blocks)
            core.preprocess_add_request = functools.partial(self._salt, core.preprocess_add_request)
            scheduler = core.scheduler
            scheduler.update_from_output = functools.partial(self._before_output, scheduler.update_from_output)

    def _salt(self, preprocess: Any, request: Any) -> Any:
        """Salt a request before its blocks are hashed. Runs in the core's input thread."""
        own, versions = request.cache_salt, (self.version, self._load_of(request.lora_request))
        request.cache_salt = _salt_for(request, own, versions)
        result = preprocess(request)
        result[0].penstock_salt = own, versions
        return result

    def _look_up(self, get_computed_blocks: Any, request: Any) -> Any:
        """Look up cached KV of the weights in force, for a request without KV."""
        own, had = getattr(request, "penstock_salt", (request.cache_salt, (None, None)))
        if (versions := (self.version, self._load_of(request.lora_request))) != had:
            request.penstock_salt = own, versions
            request.cache_salt = _salt_for(request, own, versions)
            request.block_hashes = []
            request.update_block_hashes()
        return get_computed_blocks(request)

    def check(self) -> None:
        """Raise StateError if KV leaves the engine: it would meet other weights later."""
        if (connector := getattr(self._core.scheduler, "connector", None)) is not None:
            raise StateError(
                f"the KV connector {type(connector).__name__} shares KV outside of the engine, so requests in flight "
                "alone cannot keep theirs; update with kv='recompute'"
            )

    def keep_in_flight(self, version: int) -> int:
        """Let requests that are making tokens keep their KV. Return how many. No step may be under way."""
        self.salt()
        self.version = version
        self._core.reset_encoder_cache()
        return self._keep(self._core.scheduler.requests.values())

    def keep_of(self, requests: Iterable[Any]) -> tuple[int, int]:
        """Do the same for an adapter. Return how many lose and how many keep KV."""
        chosen = list(requests)
        held = sum(bool(request.num_computed_tokens) for request in chosen)
        kept = self._keep(chosen)
        return held - kept, kept

    def _keep(self, requests: Iterable[Any]) -> int:
        """Label requests that are making tokens, and return how many.

        The others give up their KV: for a half-computed prompt, it is unknown which weights made which part.
        """
        scheduler, chosen = self._core.scheduler, list(requests)
        names = {request.request_id for request in chosen}
        for request in [one for one in reversed(scheduler.running) if one.request_id in names]:
            if not _makes_tokens(request):
                scheduler.running.remove(request)
                scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
                scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001 - as vLLM's reset of all
        kept = {request.request_id for request in chosen if request.num_computed_tokens}
        if new := sorted(kept - self._kept):
            send_mark(self._core, kept=new)
        self._kept = (self._kept & scheduler.requests.keys()) | kept
        return len(kept)

    def _before_output(self, update_from_output: Any, scheduled: Any, *args: Any) -> Any:
        """Report kept requests that this step recomputes, before its outputs."""
        if self._kept:
            # In vLLM's second model runner, a resumed request is among the new ones.
            begun = {*scheduled.scheduled_cached_reqs.resumed_req_ids}
            begun.update(new.req_id for new in scheduled.scheduled_new_reqs)
            if anew := sorted(self._kept & begun):
                send_mark(self._core, anew=anew)
            self._kept -= begun
        return update_from_output(scheduled, *args)


def _salt_for(request: Any, own: str | None, versions: tuple[int | None, int | None]) -> str | None:
    name = None if request.lora_request is None else request.lora_request.lora_name
    return salt_of(own, versions[0], name, versions[1])


def _makes_tokens(request: Any) -> bool:
    """Whether all its tokens have KV except the last one, which this engine made."""
    return request.num_output_tokens > 0 and request.num_computed_tokens >= request.num_tokens - 1
