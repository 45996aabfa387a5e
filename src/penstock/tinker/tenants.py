"""Tenants: their keys, and how much each may have."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock import config
from penstock.errors import ConfigError, reading, whole_number
from penstock.settings import is_loopback

logger = logging.getLogger(__name__)

MOST_QUEUED, MOST_BYTES = 8192, 4 << 30
MOST_SESSIONS, MOST_MODELS = 1024, 64
LIMITS = ("max_queued", "max_bytes", "max_sessions", "max_models")
SETTLED_S = 1.0
"""Age at which a changed keys file is read: a younger one may be half written, and half a list of keys is a list."""
PREFIX = "tml-"
"""The SDK refuses keys that begin otherwise."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the service; ids of another's sessions, models and checkpoints do not exist for it.

    Attributes:
        name: in the database and in listings.
        key: None: whoever sends any key.
        max_queued: operations that are not finished; one more is answered with 429, and the SDK waits.
        max_bytes: of operations that are not finished and of kept results; 429 too.
        max_sessions: that are open.
        max_models: that the learner holds at once.
    """

    name: str
    key: str | None = None
    max_queued: int = MOST_QUEUED
    max_bytes: int = MOST_BYTES
    max_sessions: int = MOST_SESSIONS
    max_models: int = MOST_MODELS


class Tenants:
    """Finds the tenant of a key.

    Args:
        tenants: all of them.
        file: that they were read from, and is read again, in a thread, when it has changed.
    """

    def __init__(self, tenants: Sequence[Tenant], file: Path | None = None) -> None:
        self._tenants = tenants
        self._file = file
        self._stamp: tuple[int, ...] | None = None
        self.open = any(tenant.key is None for tenant in tenants)
        """Any key will do."""

    def named(self, name: str) -> Tenant:
        """Return the tenant of a name, one with the usual limits if the keys no longer have it."""
        return next((tenant for tenant in self._tenants if tenant.name == name), Tenant(name))

    def of(self, key: str | None) -> Tenant | None:
        """Return the tenant of a key, compared in constant time; None if there is none."""
        given, found = (key or "").encode(), None
        for tenant in self._tenants:
            if key and (tenant.key is None or hmac.compare_digest(given, tenant.key.encode())):
                found = tenant
        return found

    async def refresh(self) -> None:
        """Read the file again if it has changed and settled; a bad one leaves the tenants as they were."""
        if self._file is None or (stamp := _stamp(self._file)) == self._stamp:
            return
        if stamp and 0 <= time.time_ns() - max(stamp[:2]) < SETTLED_S * 1e9:  # negative: by another machine's clock
            return
        self._stamp = stamp
        try:
            tenants = await asyncio.to_thread(_tenants_of, self._file)
        except ConfigError as error:
            logger.warning("the tenants stay as they were: %s", error)
            return
        if tenants != self._tenants:
            self._tenants = tenants
            logger.info("%s has changed; the tenants are %s", self._file, ", ".join(each.name for each in tenants))


def read_keys(file: Path | None) -> Tenants:
    """Read the tenants of a YAML file, `NAME: {key, max_queued, ...}`; without a file one tenant has every key.

    Raises:
        ConfigError: it cannot be read, others can read it, or a key is missing, too plain or used twice.
    """
    return Tenants([Tenant("default")]) if file is None else Tenants(_tenants_of(file), file)


def _tenants_of(file: Path) -> list[Tenant]:
    if _stamp(file) is not None and not file.is_file():  # to open a FIFO would wait for ever
        raise ConfigError(f"--keys {file} is no regular file; give one, of mode 0600")
    # YAML that is nested too deeply, a number of 5,000 digits, a name that does not encode
    with reading(f"--keys {file}", ConfigError):
        tenants = [_tenant(name, values) for name, values in config.read_keys(file, "--keys").items()]
    if len({tenant.key for tenant in tenants}) < len(tenants):
        raise ConfigError(f"--keys {file} gives one key to two tenants")
    return tenants


def refuse_open_service(host: str, tenants: Tenants) -> None:
    """Raise ConfigError if a service that any key opens would listen beyond this machine."""
    if tenants.open and not is_loopback(host):
        raise ConfigError(f"without --keys any key opens the service, so --host {host} is refused; give --keys FILE")


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return what changes with a file; None: it is not there."""
    try:
        known = file.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_ctime_ns, known.st_size, known.st_ino


def _tenant(name: str, given: object) -> Tenant:
    values: dict[str, Any] = dict(cast("dict[str, Any]", given)) if isinstance(given, dict) else {"key": given}
    if unknown := values.keys() - {"key", *LIMITS}:
        raise ConfigError(
            f"tenant {name} has the unknown {', '.join(map(str, unknown))}; known: {', '.join(('key', *LIMITS))}"
        )
    key = values.pop("key", None)
    if not isinstance(key, str) or not key.startswith(PREFIX) or len(key) < 12 or not key.isascii():  # noqa: PLR2004
        raise ConfigError(
            f"tenant {name} needs a key that begins with {PREFIX} and has at least 12 characters, of ASCII"
        )
    name.encode()
    for limit, most in values.items():
        whole_number(most, f"{limit} of tenant {name}", least=1, error=ConfigError)
    return Tenant(name, key, **values)
