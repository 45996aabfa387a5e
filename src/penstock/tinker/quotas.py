"""What each tenant has in the service, counted in the database: its API processes count together."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from penstock.errors import PenstockError
from penstock.tinker.database import futures, usage
from penstock.tinker.tenants import Tenant


class QuotaError(PenstockError):
    """The tenant has as much in the queue as it may; the SDK waits and sends the request again."""


def over_quota(connection: Connection, tenant: Tenant, size: int) -> str | None:
    """Return why a tenant may not queue one operation of `size` bytes more; None: it may."""
    used = connection.execute(select(usage).where(usage.c.tenant == tenant.name)).first()
    if used is None:
        return None
    if used.queued >= tenant.max_queued:
        return f"{tenant.max_queued} operations of yours are not finished yet; wait for them"
    if used.bytes and used.bytes + size > tenant.max_bytes:
        return (
            f"your queued operations and results have {used.bytes} bytes, this one has {size} more, and you may have "
            f"{tenant.max_bytes}; wait for them and fetch their results"
        )
    return None


def charge(connection: Connection, tenant: str, operations: int, size: int) -> None:
    """Add to what a tenant has: operations that are not finished, and bytes of requests and results."""
    u = usage.c
    change = update(usage).where(u.tenant == tenant).values(queued=u.queued + operations, bytes=u.bytes + size)
    if not connection.execute(change).rowcount:
        connection.execute(insert(usage).values(tenant=tenant, queued=operations, bytes=size))


def discharge(connection: Connection, dropped: Any) -> None:
    """Take the bytes of results that are about to be dropped from what their tenants have.

    Args:
        connection: of the transaction that drops them.
        dropped: condition on `futures`.
    """
    sizes = select(futures.c.tenant, func.sum(futures.c.size)).where(dropped).group_by(futures.c.tenant)
    for tenant, size in connection.execute(sizes).all():
        charge(connection, tenant, 0, -int(size))
