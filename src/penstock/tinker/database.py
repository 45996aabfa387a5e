"""The service's tables, and the one thread that works on them.

SQLite by default, PostgreSQL by URL. Several processes may use one database.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from penstock.errors import ConfigError, StateError

T = TypeVar("T")
Work = Callable[[Connection], T]

MOST_TOGETHER = 256
"""Pieces of work in one transaction."""
BUSY_S = 30
"""How long a process waits for another's transaction."""
_LOCK = 0x7_1E6
"""PostgreSQL's advisory lock of migrations; any constant that others do not use."""

metadata = MetaData()
BIG = BigInteger().with_variant(Integer, "sqlite")

sessions = Table(
    "sessions",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("finished", String),
    Column("about", JSON, nullable=False),
)
models = Table(
    "models",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False, index=True),
    Column("tenant", String, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON),
    Column("live", Boolean, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("gradient", Boolean, nullable=False),
    Column("lost", Text),
    Column("lost_at", Float),
)
futures = Table(
    "futures",
    metadata,
    Column("number", BIG, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("tenant", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("scope", String, nullable=False),
    Column("executor", String, nullable=False),
    Column("state", String, nullable=False),
    Column("body", LargeBinary),
    Column("result", LargeBinary),
    Column("content_type", String),
    Column("error", Text),
    Column("category", String),
    Column("arrived", Float, nullable=False),
    Column("finished", Float),
    Column("retrieved", Float),
    Index("ix_futures_state", "state", "executor", "number"),
)
samplers = Table(
    "samplers",
    metadata,
    Column("id", String, primary_key=True),
    Column("session", String, nullable=False, index=True),
    Column("tenant", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("base_model", String, nullable=False),
    Column("path", String),
    Column("adapter", String),
    Column("folder", String),
)
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String, primary_key=True),
    Column("model", String, nullable=False, index=True),
    Column("tenant", String, nullable=False, index=True),
    Column("kind", String, nullable=False),
    Column("folder", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("public", Boolean, nullable=False),
    Column("size", BIG, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("user_metadata", JSON),
)
processes = Table(
    "processes", metadata, Column("name", String, primary_key=True), Column("seen", Float, nullable=False)
)
facts = Table("facts", metadata, Column("name", String, primary_key=True), Column("value", JSON, nullable=False))


def open_engine(url: str) -> Engine:
    """Open a database and bring its tables to this version.

    Raises:
        ConfigError: the URL is none, or the database cannot be used.
    """
    try:
        parsed = make_url(url)
        sqlite = parsed.get_backend_name() == "sqlite"
        engine = create_engine(parsed, pool_pre_ping=not sqlite, connect_args={"timeout": BUSY_S} if sqlite else {})
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"--database {url!r} cannot be used: {error}; give sqlite:///FILE or postgresql+..."
        ) from error
    if sqlite:
        _prepare_sqlite(engine)
    try:
        _migrate(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        shown = parsed.render_as_string(hide_password=True)
        raise ConfigError(f"the database {shown} cannot be used: {error}") from error
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # so that the driver begins no transaction of its own
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}")

    def begun(connection: Connection) -> None:
        # One that began by reading could not write any more once another process had written.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)


def _migrate(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


class Database:
    """Runs pieces of work in a thread. All that wait are one transaction, so many small writes cost one commit.

    Args:
        url: SQLAlchemy's, such as `sqlite:///FILE`.

    Raises:
        ConfigError: it cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self._queue: queue.SimpleQueue[tuple[Work[Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tinker-database", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T]) -> T:
        """Return what `work` returns, once that is on disk. It may run twice, so it must change the database alone.

        Raises:
            StateError: the database refused; nothing of this work is in it.
        """
        future: Future[T] = Future()
        self._queue.put((work, future))
        return await asyncio.wrap_future(future)

    def post(self, work: Work[Any]) -> None:
        """Have `work` done, without waiting for it."""
        self._queue.put((work, Future()))

    async def close(self) -> None:
        """Do what is left, and close the connections."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._engine.dispose()

    def _work(self) -> None:
        ended = False
        while not ended:
            batch: list[tuple[Work[Any], Future[Any]]] = []
            while not batch or (len(batch) < MOST_TOGETHER and not self._queue.empty()):
                item = self._queue.get()
                if item is None:
                    ended = True
                    break
                if item[1].set_running_or_notify_cancel():
                    batch.append(item)
            if batch and not self._together(batch):
                for item in batch:
                    self._together([item], alone=True)

    def _together(self, batch: Sequence[tuple[Work[Any], Future[Any]]], *, alone: bool = False) -> bool:
        """Do a batch as one transaction. If that fails, nothing of it is done; one that is alone gets the error."""
        results: list[Any] = []
        try:
            with self._engine.begin() as connection:
                results.extend(work(connection) for work, _ in batch)
        except Exception as error:  # noqa: BLE001 - each caller gets its own, below
            if not alone:
                return False
            batch[0][1].set_exception(_as_ours(error))
            return True
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
        return True


def _as_ours(error: Exception) -> Exception:
    if not isinstance(error, SQLAlchemyError):
        return error
    reason = cast("Any", error).orig if isinstance(error, DBAPIError) else error
    ours = StateError(f"the service's database refused: {reason}")
    ours.__cause__ = error
    return ours
