"""The salt that keeps requests from cached KV of other weights.

vLLM looks up cached prefixes by tokens, a request's `cache_salt` and, for an adapter, its name and path. It knows no
versions, so KV outlives the weights that made it.
"""

# pyright: basic

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any


def salt_of(
    caller_salt: str | None, weights_version: int | None, adapter: str | None, adapter_version: int | None
) -> str | None:
    """Return the `cache_salt` of a request; requests with equal ones share cached prefixes.

    Args:
        caller_salt: the request's own, which separates callers.
        weights_version: of the base, where its KV must not outlive it; None: no salt for it.
        adapter: name of the request's LoRA adapter.
        adapter_version: of that adapter; None: not known, no salt for it.

    Returns:
        ASCII letters and digits that differ if any argument does; the caller's salt where neither version is given.
    """
    if weights_version is None and adapter_version is None:
        return caller_salt
    named = json.dumps([weights_version, adapter, adapter_version, caller_salt])
    # A digest, since stores of KV outside the engine make keys and paths of it, and adapters have any name.
    return hashlib.sha256(named.encode()).hexdigest()


class Salting:
    """Salts every request of one engine core with the versions in force when it looks for cached KV.

    So whatever an older request computes, before a change or after, lies under a salt that no new request has. One
    that has no KV, because it waits or was preempted, gets the salt in force as it looks.

    Args:
        core: vLLM's.
        versions: returns the base's version and the adapter's for a LoRARequest, or None; asked in any thread.
    """

    def __init__(self, core: Any, versions: Callable[[Any], tuple[int | None, int | None]]) -> None:
        self._core = core
        self._versions = versions
        self._installed = False

    def install(self) -> None:
        """Salt from now on, in the core's thread; again is harmless."""
        if not self._installed:
            self._installed = True
            manager, core = self._core.scheduler.kv_cache_manager, self._core
            manager.get_computed_blocks = functools.partial(self._look_up, manager.get_computed_blocks)
            core.preprocess_add_request = functools.partial(self._salt, core.preprocess_add_request)

    def _salt(self, preprocess: Any, request: Any) -> Any:
        """Salt a request before its blocks are hashed, in the core's input thread."""
        own, versions = request.cache_salt, self._versions(request.lora_request)
        request.cache_salt = _salt_for(request, own, versions)
        result = preprocess(request)
        result[0].penstock_salt = own, versions
        return result

    def _look_up(self, get_computed_blocks: Any, request: Any) -> Any:
        """Look for cached KV of the weights in force; vLLM does so where a request has none."""
        own, had = getattr(request, "penstock_salt", (request.cache_salt, (None, None)))
        if (versions := self._versions(request.lora_request)) != had:
            request.penstock_salt = own, versions
            request.cache_salt = _salt_for(request, own, versions)
            request.block_hashes = []
            request.update_block_hashes()
        return get_computed_blocks(request)


def _salt_for(request: Any, own: str | None, versions: tuple[int | None, int | None]) -> str | None:
    name = None if request.lora_request is None else request.lora_request.lora_name
    return salt_of(own, versions[0], name, versions[1])
