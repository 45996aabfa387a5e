"""Decide who may call the router, and which paths go to an engine: those of data calls, and no others.

vLLM 0.26 to 0.32. A test reads every route of the vLLM in use and fails for one that is on neither list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.guard import cross_site, has_key, kind_of_path
from penstock.router.head import RequestHead
from penstock.router.http import RefusalError, shown

HEALTH = b"/router/health"
"""Needs no key."""
_CHANGES = {b"/router/engines", b"/router/gate", b"/router/policy"}
_READS = {b"GET", b"HEAD"}


class Access:
    """The rules of one router.

    Args:
        api_key: asked for on every request but the health check; None: nobody is asked.
        admin_key: asked for where a call changes the router, and accepted everywhere; None: `api_key` does.
        hosts: names that `Host` may have in calls to the router itself, besides those of `penstock.guard`.
    """

    def __init__(self, api_key: str | None, admin_key: str | None, hosts: Iterable[str] = ()) -> None:
        self._api_key = api_key
        self._admin_key = admin_key
        self._hosts = {name.lower() for name in hosts}
        self.asks_for_key = api_key is not None or admin_key is not None

    def check_key(self, request: RequestHead) -> None:
        """Return if the request has the key that it needs; RefusalError: 401."""
        path = request.target.partition(b"?")[0]
        needs_admin = self._admin_key is not None and path in _CHANGES and request.method not in _READS
        if (self._api_key is None and not needs_admin) or (path == HEALTH and request.method == b"GET"):
            return
        accepted = (self._admin_key,) if needs_admin else (self._admin_key, self._api_key)
        if not has_key(request.authorization, [key for key in accepted if key is not None]):
            kind = "admin" if needs_admin else "API"
            what = "is wrong" if request.authorization else "is missing"
            raise RefusalError(401, "bad_api_key", f"the router's {kind} key {what}: send Authorization: Bearer KEY")

    def check_page(self, request: RequestHead) -> None:
        """Return if a call to the router's own endpoints comes from no web page; RefusalError: 403."""
        fields = [(b"host", b"localhost" if request.host is None else request.host)]
        if request.origin is not None:
            fields.append((b"origin", request.origin))
        why = cross_site(fields, self._hosts, setting="router.allowed_hosts")
        if why is not None:
            call = f"{request.method.decode()} {shown(request.target)[1:-1]}"
            raise RefusalError(403, "cross_site", f"{call}: {why}")


DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Any engine gives the same answer to these, and keeps nothing of them that a later call needs."""


def check_data_path(path: bytes, added: Collection[bytes] = ()) -> None:
    """Return if requests for `path` go to an engine; `added`: paths of the configuration.

    Raises:
        RefusalError: 400 for a path that servers read in different ways, 403 for a call to one engine, 404 for any
            other path.
    """
    if path in added or path in DATA_PATHS:
        return
    kind = kind_of_path(path)
    if kind == "ambiguous":
        what = "without escapes, empty or dot segments and special characters"
        raise RefusalError(400, "bad_path", f"path {shown(path)} is not canonical; send it {what}")
    name = shown(path)[1:-1]
    if kind == "control":
        what = f"{name} would reach one engine only"
        raise RefusalError(403, "control_call", f"{what}; control goes to every engine by the fleet's own client")
    if kind == "private":
        raise RefusalError(403, "control_call", f"{name} would tell of one engine only; ask that engine itself")
    hint = "GET / lists the data calls that are; router.data_paths adds to them"
    raise RefusalError(404, "unknown_path", f"{name} is not served here: {hint}")
