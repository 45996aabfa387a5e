"""Who may call the router: keys for all of it, and for its own endpoints no web pages and no foreign host names."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.guard import cross_site, has_key
from penstock.router.head import RequestHead
from penstock.router.refusal import RefusalError, shown

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
