"""Creates all tables. Databases from before the first release are not migrated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a004"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create all tables."""
    _create_what_runs()
    _create_what_is_kept()


def _create_what_runs() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False, index=True),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("seen", sa.Float, nullable=False),
        sa.Column("finished", sa.String),
        sa.Column("about", sa.JSON, nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("session", sa.String, nullable=False, index=True),
        sa.Column("tenant", sa.String, nullable=False, index=True),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("gradient", sa.Boolean, nullable=False),
        sa.Column("lost", sa.Text),
        sa.Column("lost_at", sa.Float),
    )
    op.create_table(
        "futures",
        sa.Column("number", BIG, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False, index=True),
        sa.Column("executor", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("result", sa.LargeBinary),
        sa.Column("content_type", sa.String),
        sa.Column("error", sa.Text),
        sa.Column("category", sa.String),
        sa.Column("arrived", sa.Float, nullable=False),
        sa.Column("finished", sa.Float),
        sa.Column("retrieved", sa.Float),
        sa.Column("size", BIG, nullable=False, server_default="0"),
        sa.Index("ix_futures_state", "state", "executor", "number"),
    )
    op.create_table(
        "usage",
        sa.Column("tenant", sa.String, primary_key=True),
        sa.Column("queued", BIG, nullable=False),
        sa.Column("bytes", BIG, nullable=False),
    )


def _create_what_is_kept() -> None:
    op.create_table(
        "samplers",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("session", sa.String, nullable=False, index=True),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("path", sa.String),
        sa.Column("adapter", sa.String),
        sa.Column("folder", sa.String),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("clients", sa.Integer, nullable=False, server_default="0"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("path", sa.String, primary_key=True),
        sa.Column("model", sa.String, nullable=False, index=True),
        sa.Column("tenant", sa.String, nullable=False, index=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("folder", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON),
    )
    op.create_table(
        "processes", sa.Column("name", sa.String, primary_key=True), sa.Column("seen", sa.Float, nullable=False)
    )
    op.create_table(
        "facts", sa.Column("name", sa.String, primary_key=True), sa.Column("value", sa.JSON, nullable=False)
    )
