"""What each tenant has in the queue."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a002"
down_revision = "a001"

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
FILL = """
    insert into usage (tenant, queued, bytes)
    select tenant, sum(case when state = 'pending' then 1 else 0 end), sum(size) from futures group by tenant
"""


def upgrade() -> None:
    """Add it."""
    op.add_column("futures", sa.Column("size", BIG, nullable=False, server_default="0"))
    op.create_table(
        "usage",
        sa.Column("tenant", sa.String, primary_key=True),
        sa.Column("queued", BIG, nullable=False),
        sa.Column("bytes", BIG, nullable=False),
    )
    op.execute("update futures set size = coalesce(length(body), 0) + coalesce(length(result), 0)")
    op.execute(FILL)
