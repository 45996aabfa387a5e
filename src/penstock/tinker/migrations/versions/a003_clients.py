"""How many clients each sampler has."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a003"
down_revision = "a002"


def upgrade() -> None:
    """Add it."""
    op.add_column("samplers", sa.Column("clients", sa.Integer, nullable=False, server_default="0"))
