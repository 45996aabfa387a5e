"""Checks that refuse control calls without the key, from web pages, or under a foreign host name.

A browser sends a page's plain POST to 127.0.0.1 without asking. If an attacker rebinds the page's name to 127.0.0.1
(DNS rebinding), the page even reads the answer. Browsers set `Origin` and `Host` themselves, so both are reliable.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import os
import re
import secrets
import socket
import threading
from collections.abc import Collection, Iterable

HOSTS_ENV = "PENSTOCK_HOSTS"
"""Variable for a server's names beyond IP addresses and its machine's names, separated by commas."""

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
"""Paths of an engine that need no key, for probes and scrapers; they change no state and show no request."""

_DATA = """
    /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/responses /v1/messages
    /v1/messages/count_tokens /v1/systemone /inference/v1/generate /generative_scoring
    /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
    /v1/audio/transcriptions /v1/audio/translations /v1/realtime /tokenize /detokenize /tokenizer_info
    /v1/completions/render /v1/chat/completions/render /v1/responses/render /v1/messages/render
    /v1/completions/derender /v1/chat/completions/derender /v1/models
"""
DATA_PATHS = OPEN_PATHS | frozenset(_DATA.split())
"""Paths of an engine that a web page with the key may call. Every other path counts as control."""

_address = functools.lru_cache(maxsize=64)(ipaddress.ip_address)  # parsing one takes 15 us
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]@/]+))(?::[0-9]*)?")


def new_key() -> str:
    """Make a random key."""
    return secrets.token_urlsafe(32)


def has_key(given: bytes, keys: Iterable[str]) -> bool:
    """Return whether `Authorization: given` has one of `keys`, in constant time."""
    found = [hmac.compare_digest(given, b"Bearer " + key.encode()) for key in keys]
    return any(found)


def cross_site(
    headers: Iterable[tuple[bytes, bytes]], known: Collection[str] = (), *, setting: str = f"{HOSTS_ENV} of its process"
) -> str | None:
    """Return why a control call is refused as a web page's; None: it is not.

    `known`: names of this server beyond IP addresses, localhost, the machine's name and those of `HOSTS_ENV`.
    `setting`: the setting for more names.
    """
    for name, value in headers:
        if name == b"origin":
            return "control calls are not for web pages; leave Origin out"
        if name == b"host" and not _is_ours(value.decode("latin-1").strip().lower(), known):
            host = value.decode("latin-1")[:80]
            return f"this server is not called {host!r}; use its IP address, or name it in {setting}"
    return None


def _is_ours(host: str, known: Collection[str]) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1] or match[2]
    try:
        _address(name)
    except ValueError:
        also = os.environ.get(HOSTS_ENV, "").lower().split(",")
        return name in {"localhost", socket.gethostname().lower(), *known, *(given.strip() for given in also)}
    return True


class Strangers:
    """Connections that have not shown the key, at most `most`; a further one closes the oldest.

    Without a bound, strangers could take all threads and descriptors. To refuse new ones would shut out the fleet.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets[connection] = None
            oldest = next(iter(self._sockets)) if len(self._sockets) > self._most else None
            if oldest is not None:
                del self._sockets[oldest]
        if oldest is not None:
            shut(oldest)

    def remove(self, connection: socket.socket) -> None:
        """Stop counting a connection that has shown the key or is closed."""
        with self._lock:
            self._sockets.pop(connection, None)


def shut(connection: socket.socket) -> None:
    """End a connection; threads that read or write it see its end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return
