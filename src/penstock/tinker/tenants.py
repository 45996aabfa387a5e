"""Tenants: their keys, and how much of them may be queued."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock import settings
from penstock.errors import ConfigError

MOST_QUEUED = 8192
"""Operations of one tenant that are not finished."""
PREFIX = "tml-"
"""The SDK refuses keys that begin otherwise."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the service; ids of another's sessions, models and checkpoints do not exist for it.

    Attributes:
        name: in the database and in listings.
        key: None: whoever sends any key.
        max_queued: one operation more is answered with 429, and the SDK waits.
    """

    name: str
    key: str | None = None
    max_queued: int = MOST_QUEUED


class Tenants:
    """Finds the tenant of a key."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tenants

    @property
    def open(self) -> bool:
        """Any key will do."""
        return any(tenant.key is None for tenant in self._tenants)

    def of(self, key: str | None) -> Tenant | None:
        """Return the tenant of a key, compared in constant time; None if there is none."""
        given, found = (key or "").encode(), None
        for tenant in self._tenants:
            if key and (tenant.key is None or hmac.compare_digest(given, tenant.key.encode())):
                found = tenant
        return found


def read_keys(file: Path | None) -> Tenants:
    """Read the tenants of a YAML file, `NAME: {key, max_queued}`; without a file one tenant has every key.

    Raises:
        ConfigError: it cannot be read, others can read it, or a key is missing, too plain or used twice.
    """
    if file is None:
        return Tenants([Tenant("default")])
    tenants = [_tenant(name, values) for name, values in settings.read_keys(file, "--keys").items()]
    if len({tenant.key for tenant in tenants}) < len(tenants):
        raise ConfigError(f"--keys {file} gives one key to two tenants")
    return Tenants(tenants)


def _tenant(name: str, given: object) -> Tenant:
    values: dict[str, Any] = cast("dict[str, Any]", given) if isinstance(given, dict) else {"key": given}
    if unknown := values.keys() - {"key", "max_queued"}:
        raise ConfigError(f"tenant {name} has the unknown {', '.join(map(str, unknown))}; known: key, max_queued")
    key, most = values.get("key"), values.get("max_queued", MOST_QUEUED)
    if not isinstance(key, str) or not key.startswith(PREFIX) or len(key) < 12:  # noqa: PLR2004
        raise ConfigError(f"tenant {name} needs a key that begins with {PREFIX} and has at least 12 characters")
    if type(most) is not int or most < 1:
        raise ConfigError(f"tenant {name}: max_queued is a whole number from 1, got {most!r}")
    return Tenant(name, key, most)
