"""The salt that keeps requests from cached KV of other weights.

vLLM looks up cached prefixes by tokens, a request's `cache_salt` and, for an adapter, its name and path. It knows no
versions, so KV outlives the weights that made it.
"""

from __future__ import annotations

import hashlib
import json
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


def resalt(request: Any, *, weights: int | None = None, adapter: int | None = None) -> None:
    """Salt a request of the scheduler anew, and hash its blocks again; the caller's own salt stays in it.

    What it has in blocks keeps the hashes under which vLLM has stored them. So it must hold no KV, or else store no
    more under hashes that are found.

    Args:
        request: vLLM's `v1.request.Request`.
        weights: version of the base that it is to be kept to; None: as before.
        adapter: version of its adapter; None: as before.
    """
    caller, had_weights, had_adapter = getattr(request, "penstock_salt", (request.cache_salt, None, None))
    weights = had_weights if weights is None else weights
    adapter = had_adapter if adapter is None else adapter
    request.penstock_salt = caller, weights, adapter
    name = None if request.lora_request is None else request.lora_request.lora_name
    if (salt := salt_of(caller, weights, name, adapter)) != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        request.update_block_hashes()
