"""Which paths go to an engine: those of data calls, and no others.

vLLM 0.26 to 0.32. A test reads every route of the vLLM in use and fails for one that is on neither list.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.router.refusal import RefusalError, shown

DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Any engine gives the same answer to these, and keeps nothing of them that a later call needs."""
CONTROL_PATHS = frozenset(
    b"/pause /resume /abort_requests /inference/v1/abort_requests /reset_prefix_cache /reset_mm_cache "
    b"/reset_encoder_cache /sleep /wake_up /release_kv_cache_memory /collective_rpc /init_weight_transfer_engine "
    b"/shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update /update_weights "
    b"/finish_weight_update /update_weight_version /weight_checker /start_profile /stop_profile /scale_elastic_ep "
    b"/is_scaling_elastic_ep /fault_tolerance/apply /v1/load_lora_adapter /v1/unload_lora_adapter /adapters".split()
)
"""These change the state of the one engine that gets them and leave the others as they are."""
PRIVATE_PATHS = frozenset(
    b"/server_info /weight_info /is_paused /is_sleeping /get_world_size /load /kv_event_sources "
    b"/fault_tolerance/status /metrics /invocations /v1/realtime /docs /docs/oauth2-redirect /redoc "
    b"/openapi.json".split()
)
"""These tell of the one engine that answers, keep a state there or need another protocol; so do stored responses."""
_CONTROL_PREFIXES = (b"/penstock/", b"/sim/", b"/adapters/")
_PRIVATE_PREFIXES = (b"/v1/responses/",)
_CANONICAL = re.compile(rb"/(?:[0-9A-Za-z._~-]+/)*(?:[0-9A-Za-z._~-]+)?")
_DOTS = re.compile(rb"/\.\.?(?:/|$)")


def is_canonical(path: bytes) -> bool:
    """Whether every server reads the same path: no escapes, no empty or dot segments, no special characters."""
    return _CANONICAL.fullmatch(path) is not None and _DOTS.search(path) is None


def check_data_path(path: bytes, added: Collection[bytes] = ()) -> None:
    """Return if requests for `path` go to an engine; `added`: paths of the configuration.

    Raises:
        RefusalError: 400 for a path that servers read in different ways, 403 for a call to one engine, 404 for any
            other path.
    """
    if path in added or path in DATA_PATHS:
        return
    if not is_canonical(path):
        what = "without escapes, empty or dot segments and special characters"
        raise RefusalError(400, "bad_path", f"path {shown(path)} is not canonical; send it {what}")
    bare = path.rstrip(b"/")
    name = shown(path)[1:-1]
    if bare in CONTROL_PATHS or path.startswith(_CONTROL_PREFIXES):
        what = f"{name} would reach one engine only"
        raise RefusalError(403, "control_call", f"{what}; control goes to every engine by the fleet's own client")
    if bare in PRIVATE_PATHS or path.startswith(_PRIVATE_PREFIXES):
        raise RefusalError(403, "control_call", f"{name} would tell of one engine only; ask that engine itself")
    hint = "GET / lists the data calls that are; router.data_paths adds to them"
    raise RefusalError(404, "unknown_path", f"{name} is not served here: {hint}")
