"""The service's tables, and the single thread that works on them.

The database is SQLite by default, or PostgreSQL by URL. Several processes may use one database.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

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
    inspect,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from penstock.errors import ConfigError, StateError

T = TypeVar("T")
Work = Callable[[Connection], T]

MOST_TOGETHER = 256
"""Maximum number of pieces of work in one transaction."""
BUSY_S = 30
"""Seconds that a process waits for another's transaction."""
JOURNAL = f"journal_size_limit={64 << 20}"
"""Limit in bytes of the write-ahead log on disk, once its pages are in the file."""
_LOCK = 0x7_1E6
"""PostgreSQL's advisory lock for the creation of tables: any constant that nothing else uses."""

DATABASE = "PENSTOCK_TINKER_DATABASE"
"""Environment variable of the URL. It is no argument, because `ps` would show its password to all users."""

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
    Column("scope", String, nullable=False, index=True),
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
    Column("size", BIG, nullable=False, server_default="0"),
    Index("ix_futures_state", "state", "executor", "number"),
)
usage = Table(
    "usage",
    metadata,
    Column("tenant", String, primary_key=True),
    Column("queued", BIG, nullable=False),
    Column("bytes", BIG, nullable=False),
)
"""Usage per tenant: its unfinished operations, and the bytes of its requests and results."""
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
    Column("used", Float, nullable=False),
    Column("clients", Integer, nullable=False, server_default="0"),
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


def open_engine(url: str, *, new: bool = True) -> Engine:
    """Open a database, and create its tables if it has none.

    Raises:
        ConfigError: invalid URL, unusable database, tables of another version, or SQLite's file is missing and not
            `new`.
    """
    try:
        parsed = make_url(url)
        sqlite = parsed.get_backend_name() == "sqlite"
        engine = create_engine(parsed, pool_pre_ping=not sqlite, connect_args={"timeout": BUSY_S} if sqlite else {})
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError) as error:  # ValueError: an invalid port
        raise ConfigError(f"--database cannot be used: {error}; give sqlite:///FILE or postgresql+...") from error
    if sqlite:
        if not new and not Path(parsed.database or "").is_file():
            raise ConfigError(f"--database: there is no file {parsed.database}; give the service's own")
        if new and parsed.database and not parsed.database.startswith(":"):
            with suppress(OSError):  # the open below reports the error; mode 0600, as every tenant's tokens are in it
                # Do not open an existing file: closing it would drop SQLite's locks of this process.
                os.close(os.open(parsed.database, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        _prepare_sqlite(engine)
    try:
        _create_tables(engine)
    except ConfigError:
        engine.dispose()
        raise
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # so that the driver begins no transaction itself
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", JOURNAL):
            connection.execute(f"PRAGMA {pragma}")

    def begun(connection: Connection) -> None:
        # A transaction that began with a read could not write after another process had written.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)


def _create_tables(engine: Engine) -> None:
    """Create the missing tables. ConfigError: the database refused, or has tables of another version."""
    what = f"the database {engine.url.render_as_string(hide_password=True)} cannot be used"
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            metadata.create_all(connection)
            there = inspect(connection)
            for name, table in metadata.tables.items():
                if {column["name"] for column in there.get_columns(name)} != set(table.columns.keys()):
                    raise ConfigError(f"{what}: its {name} are of another version of Penstock; give a new one")
    except SQLAlchemyError as error:
        raise ConfigError(f"{what}: {' '.join(str(_reason(error)).split())}") from error


class Database:
    """Runs pieces of work in a thread. All waiting work shares a transaction, so small writes share a commit.

    Args:
        url: SQLAlchemy's URL, such as `sqlite:///FILE`.
        new: allow SQLite's file to be missing.

    Raises:
        ConfigError: the database cannot be used.
    """

    def __init__(self, url: str, *, new: bool = True) -> None:
        self._engine = open_engine(url, new=new)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-database")
        self._waiting: list[tuple[Work[Any], asyncio.Future[Any]]] = []
        self._working: asyncio.Task[None] | None = None

    async def run(self, work: Work[T]) -> T:
        """Run `work` and return its result once it is on disk. It may run twice, so it must change only the database.

        Raises:
            StateError: the database refused. It contains nothing of this work.
        """
        return await self._queued(work)

    def post(self, work: Work[Any], *, at_once: bool) -> None:
        """Queue `work` without waiting, to run at once or together with the next work."""
        self._queued(work, at_once=at_once).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def close(self) -> None:
        """Do the remaining work, and close the connections."""
        await (self._working or self._work())
        self._thread.shutdown()
        self._engine.dispose()

    def _queued(self, work: Work[T], *, at_once: bool = True) -> asyncio.Future[T]:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, done))
        if at_once and self._working is None:
            self._working = asyncio.create_task(self._work(), name="tinker-database")
        return done

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            if not await self._together(batch):
                for item in batch:  # one piece failed; the others can still succeed
                    await self._together([item])
        self._working = None

    async def _together(self, batch: Sequence[tuple[Work[Any], asyncio.Future[Any]]]) -> bool:
        """Do a batch as one transaction, completely or not at all. A single piece of work gets the error."""

        def work() -> list[Any]:
            with self._engine.begin() as connection:
                return [each(connection) for each, _ in batch]

        attempt = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.wait((attempt,))
        error = attempt.exception()
        if error is not None and len(batch) > 1:
            return False
        for place, (_, done) in enumerate(batch):
            if done.done():  # its caller was cancelled
                continue
            if error is None:
                done.set_result(attempt.result()[place])
            else:
                done.set_exception(_as_ours(error))
        return True


def _as_ours(error: BaseException) -> BaseException:
    if not isinstance(error, SQLAlchemyError):
        return error
    ours = StateError(f"the service's database refused: {_reason(error)}")
    ours.__cause__ = error
    return ours


def _reason(error: SQLAlchemyError) -> object:
    return cast("Any", error).orig if isinstance(error, DBAPIError) else error
