"""The salt that keeps requests from cached KV of other weights.

vLLM looks up cached prefixes by tokens, a request's `cache_salt` and, for an adapter, its name and path. It knows no
versions, so KV outlives the weights that made it.
"""

from __future__ import annotations

import hashlib
import json


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
