"""Usage of each tenant, counted in the database and so over all API processes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from penstock.errors import PenstockError
from penstock.tinker.database import futures, usage
from penstock.tinker.tenants import Tenant


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
