"""Who may call the router: keys for all of it, and for its own endpoints no web pages and no foreign host names."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable

from penstock.router.head import RequestHead
from penstock.router.refusal import RefusalError, shown

_HEALTH = b"/router/health"
_CHANGES = {b"/router/engines", b"/router/gate", b"/router/policy"}
_READS = {b"GET", b"HEAD"}


class Access:
    """The rules of one router.

    Args:
        api_key: asked for on every request but the health check; None: nobody is asked.
        admin_key: asked for where a call changes the router, and accepted everywhere; None: `api_key` does.
        host: where the router listens.
        allowed_hosts: further names that `Host` may have in calls to the router itself.
    """

    def __init__(
        self, api_key: str | None, admin_key: str | None, *, host: str = "", allowed_hosts: Iterable[str] = ()
    ) -> None:
        self._api_key = None if api_key is None else b"Bearer " + api_key.encode()
        self._admin_key = None if admin_key is None else b"Bearer " + admin_key.encode()
        self._hosts = {name.lower() for name in ("localhost", host, socket.gethostname(), *allowed_hosts) if name}
        self.asks_for_key = self._api_key is not None or self._admin_key is not None

    def check_key(self, request: RequestHead) -> None:
        """Return if the request has the key that it needs; RefusalError: 401."""
        path = request.target.partition(b"?")[0]
        given = request.authorization
        if self._admin_key is not None and hmac.compare_digest(given, self._admin_key):
            return
        changes = path in _CHANGES and request.method not in _READS
        needed = self._admin_key if changes and self._admin_key is not None else self._api_key
        if needed is None or hmac.compare_digest(given, needed) or (path == _HEALTH and request.method == b"GET"):
            return
        kind = "admin" if needed is self._admin_key else "API"
        what = "is wrong" if given else "is missing"
        raise RefusalError(401, "bad_api_key", f"the router's {kind} key {what}: send Authorization: Bearer KEY")

    def check_page(self, request: RequestHead) -> None:
        """Return if a call to the router's own endpoints comes from no web page; RefusalError: 403.

        A browser sends a page's request to loopback without asking anybody, with `Origin`; or, where the page's host
        name was made to point here (DNS rebinding), without it, but with that name in `Host`.
        """
        call = f"{request.method.decode()} {shown(request.target)[1:-1]}"
        if request.origin is not None:
            raise RefusalError(403, "cross_site", f"{call} is not for web pages; leave Origin out")
        name = _host_name(request.host)
        if name not in self._hosts and not _is_address(name):
            what = f"Host {shown(request.host)} is not a name of this router"
            raise RefusalError(
                403, "foreign_host", f"{call}: {what}; use its address, or add it to router.allowed_hosts"
            )


def _host_name(host: bytes) -> str:
    text = host.decode("ascii", "replace").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
