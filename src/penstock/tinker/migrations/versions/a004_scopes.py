"""Futures found by their scope, and forward passes named as such."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from penstock.tinker.schema import pb

revision = "a004"
down_revision = "a003"


def upgrade() -> None:
    """Add the index; a forward pass that waits under the name forward_backward would count as a gradient."""
    op.create_index("ix_futures_scope", "futures", ["scope"])
    connection = op.get_bind()
    futures = sa.table("futures", *map(sa.column, ("number", "kind", "state", "body")))
    waits = (futures.c.kind == "forward_backward") & (futures.c.state == "pending")
    for number in connection.execute(sa.select(futures.c.number).where(waits)).scalars().all():
        this = futures.c.number == number
        body = connection.execute(sa.select(futures.c.body).where(this)).scalar_one()
        if pb.ForwardBackwardRequest.FromString(body).forward_only:
            connection.execute(sa.update(futures).where(this).values(kind="forward"))
