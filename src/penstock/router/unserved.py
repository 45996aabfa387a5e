"""Paths that the router does not pass on, and the reason for each.

Some change or describe the one engine that would get them. Some are read in different ways by different servers.
"""

from __future__ import annotations

import re

from penstock.router.http import RefusalError, shown

CONTROL_PATHS = frozenset(
    b"/pause /resume /abort_requests /inference/v1/abort_requests /reset_prefix_cache /reset_mm_cache "
    b"/reset_encoder_cache /sleep /wake_up /release_kv_cache_memory /collective_rpc /init_weight_transfer_engine "
    b"/shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update /update_weights "
    b"/finish_weight_update /update_weight_version /weight_checker /start_profile /stop_profile /scale_elastic_ep "
    b"/is_scaling_elastic_ep /fault_tolerance/apply /v1/load_lora_adapter /v1/unload_lora_adapter /adapters".split()
)
"""Paths that change the state of the one engine that gets them."""
PRIVATE_PATHS = frozenset(
    b"/server_info /weight_info /is_paused /is_sleeping /get_world_size /load /kv_event_sources "
    b"/fault_tolerance/status /metrics /invocations /v1/realtime /docs /docs/oauth2-redirect /redoc "
    b"/openapi.json".split()
)
"""Paths whose answer or state belongs to one engine, or that need another protocol; stored responses too."""
_CONTROL_PREFIXES = (b"/penstock/", b"/sim/", b"/adapters/", b"/router/")
_PRIVATE_PREFIXES = (b"/v1/responses/",)
_CANONICAL = re.compile(rb"/(?:[0-9A-Za-z._~-]+/)*(?:[0-9A-Za-z._~-]+)?")
_DOTS = re.compile(rb"/\.\.?(?:/|$)")


def kind_of_path(path: bytes) -> str:
    """Return a path's kind: `ambiguous`, `control`, `private` (of one engine) or `other`."""
    if not _CANONICAL.fullmatch(path) or _DOTS.search(path):  # servers would read it in different ways
        return "ambiguous"
    bare = path.rstrip(b"/")
    if bare in CONTROL_PATHS or path.startswith(_CONTROL_PREFIXES):
        return "control"
    return "private" if bare in PRIVATE_PATHS or path.startswith(_PRIVATE_PREFIXES) else "other"


def refusal(path: bytes) -> RefusalError:
    """Return the refusal of a request for `path`, which is no data path and not one of `router.data_paths`.

    Its status is 400 for a path that servers read in different ways, 403 for a call to one engine, and 404 for any
    other path.
    """
    kind = kind_of_path(path)
    if kind == "ambiguous":
        what = "without escapes, empty or dot segments and special characters"
        return RefusalError(400, "bad_path", f"path {shown(path)} is not canonical; send it {what}")
    name = shown(path)[1:-1]
    if kind == "control":
        what = f"{name} would reach one engine only"
        return RefusalError(403, "control_call", f"{what}; control goes to every engine by the fleet's own client")
    if kind == "private":
        return RefusalError(403, "control_call", f"{name} would tell of one engine only; ask that engine itself")
    hint = "GET / lists the data calls that are; router.data_paths adds to them"
    return RefusalError(404, "unknown_path", f"{name} is not served here: {hint}")
