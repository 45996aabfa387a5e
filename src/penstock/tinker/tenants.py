"""Tenants: their keys, limits, and usage, which the database counts over all API processes."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Connection, bindparam, func, insert, select, update

from penstock import config
from penstock.checks import reading, whole_number
from penstock.errors import ConfigError, PenstockError
from penstock.router_settings import is_loopback
from penstock.tinker.database import futures, usage

logger = logging.getLogger(__name__)

MOST_QUEUED, MOST_BYTES = 8192, 4 << 30
MOST_SESSIONS, MOST_MODELS = 1024, 64
LIMITS = ("max_queued", "max_bytes", "max_sessions", "max_models")
SETTLED_S = 1.0
"""Age at which a changed keys file is read. A younger file may be half written and still look complete."""
PREFIX = "tml-"
"""Prefix of keys. The SDK refuses keys without it."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the service. Other tenants' sessions, models and checkpoints are unknown to it.

    Attributes:
        key: API key; None: any key is accepted.
        max_queued: maximum number of unfinished operations. Beyond it, the answer is 429 and the SDK waits.
        max_bytes: maximum number of bytes in unfinished operations and kept results; also answered with 429.
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
        file: file of the tenants, which is read again when it has changed.
    """

    def __init__(self, tenants: Sequence[Tenant], file: Path | None = None) -> None:
        self._tenants = tenants
        self._file = file
        self._changed = 0
        self.open = any(tenant.key is None for tenant in tenants)
        """True if any key is accepted."""

    def of(self, key: str | None) -> Tenant | None:
        """Return the tenant of a key, compared in constant time, or None."""
        given, found = (key or "").encode(), None
        for tenant in self._tenants:
            if key and (tenant.key is None or hmac.compare_digest(given, tenant.key.encode())):
                found = tenant
        return found

    def refresh(self) -> None:
        """Read the file again if it has changed and settled. A bad or missing file leaves the tenants unchanged."""
        if self._file is None:
            return
        try:
            changed = self._file.stat().st_mtime_ns
            settled = not 0 <= time.time_ns() - changed < SETTLED_S * 1e9  # negative: another machine's clock
            if changed == self._changed or not settled:
                return
            self._changed = changed
            self._tenants = _tenants_of(self._file)
        except OSError:  # no such file, for example
            return
        except ConfigError as error:
            logger.warning("the tenants stay as they were: %s", error)
        else:
            logger.info("%s has changed; tenants: %s", self._file, ", ".join(each.name for each in self._tenants))


def read_keys(file: Path | None) -> Tenants:
    """Read the tenants of a YAML file, `NAME: {key, max_queued, ...}`. Without a file, one tenant has every key.

    Raises:
        ConfigError: the file is unreadable or open to other users, or a key is missing, too simple or used twice.
    """
    return Tenants([Tenant("default")]) if file is None else Tenants(_tenants_of(file), file)


def _tenants_of(file: Path) -> list[Tenant]:
    if file.exists() and not file.is_file():  # opening a FIFO would block for ever
        raise ConfigError(f"--keys {file} is no regular file; give one, of mode 0600")
    # `reading` also catches YAML nested too deeply, numbers of 5,000 digits, and names that do not encode.
    with reading(f"--keys {file}", ConfigError):
        tenants = [_tenant(name, values) for name, values in config.read_keys(file, "--keys").items()]
    if len({tenant.key for tenant in tenants}) < len(tenants):
        raise ConfigError(f"--keys {file} gives one key to two tenants")
    return tenants


def refuse_open_service(host: str, tenants: Tenants) -> None:
    """Raise ConfigError if a service open to any key would listen beyond this machine."""
    if tenants.open and not is_loopback(host):
        raise ConfigError(f"without --keys any key opens the service, so --host {host} is refused; give --keys FILE")


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


# --- usage -----------------------------------------------------------------------------------------------------------


class QuotaError(PenstockError):
    """The tenant's queue is full. The SDK waits and sends the request again."""


# Built once, because building a statement costs more than SQLite takes to run it.
_u = usage.c
_CHARGE = (
    update(usage)
    .where(_u.tenant == bindparam("whose"))
    .values(queued=_u.queued + bindparam("operations"), bytes=_u.bytes + bindparam("more"))
)
_TAKE = _CHARGE.where(
    (_u.queued < bindparam("most_queued")) & (_u.bytes + bindparam("more") <= bindparam("most_bytes"))
)


def take(connection: Connection, tenant: Tenant, size: int) -> None:
    """Count an operation of `size` bytes. QuotaError: the tenant may not queue it."""
    limits = {"most_queued": tenant.max_queued, "most_bytes": tenant.max_bytes}
    if connection.execute(_TAKE, {"whose": tenant.name, "operations": 1, "more": size, **limits}).rowcount:
        return
    used = connection.execute(select(usage).where(_u.tenant == tenant.name)).first()
    if used is None:
        connection.execute(insert(usage).values(tenant=tenant.name, queued=1, bytes=size))
        return
    if used.queued >= tenant.max_queued:
        raise QuotaError(f"{tenant.max_queued} operations of yours are not finished yet; wait for them")
    raise QuotaError(
        f"your queued operations and results have {used.bytes} bytes, this one has {size} more, and you may have "
        f"{tenant.max_bytes}; wait for them and fetch their results"
    )


def charge(connection: Connection, tenant: str, operations: int, size: int) -> None:
    """Add unfinished operations and bytes (requests, results) to a tenant's usage."""
    connection.execute(_CHARGE, {"whose": tenant, "operations": operations, "more": size})


def discharge(connection: Connection, dropped: Any) -> None:
    """Subtract the bytes of results that will be dropped from their tenants' usage.

    Args:
        connection: connection of the transaction that drops them.
        dropped: condition on `futures`.
    """
    sizes = select(futures.c.tenant, func.sum(futures.c.size)).where(dropped).group_by(futures.c.tenant)
    for tenant, size in connection.execute(sizes).all():
        charge(connection, tenant, 0, -int(size))
