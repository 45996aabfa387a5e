"""Sessions, models and samplers in the database. Only their own tenant sees them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, delete, func, insert, select, update

from penstock.errors import UserError
from penstock.tinker.checkpoints import as_json, when
from penstock.tinker.database import Database, checkpoints, facts, futures, models, samplers, sessions
from penstock.tinker.futures import KEEP_S, PENDING, Also
from penstock.tinker.requests import CreateSession
from penstock.tinker.sampling import Source
from penstock.tinker.tenants import Tenant

SILENT_S = 3600.0
"""Seconds without a heartbeat after which a session ends. Its models then leave the learner."""
UNUSED_S = 6 * 3600.0
KNOWN = 4096
"""Maximum number of samplers that need no further read of the database."""


_CREATING = select(futures.c.scope).where(
    (futures.c.state == PENDING) & futures.c.kind.in_(("create_model", "load_weights"))
)
_HELD = models.c.live | models.c.id.in_(_CREATING)
"""Models that the learner has or will create."""


class UnknownError(UserError):
    """The tenant has no session, model or sampler of that id."""


class FinishedError(UserError):
    """The session has ended."""


class Sessions:
    """The rows of sessions, models and samplers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[str, Source]] = {}
        self._used: dict[str, float] = {}

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, given: CreateSession) -> str:
        """Open a session and return its id. UserError: the tenant has too many."""
        now, session = time.time(), str(uuid.uuid4())
        about = given.model_dump()
        row = {"id": session, "tenant": tenant.name, "created": now, "seen": now, "about": about}
        is_open = (sessions.c.tenant == tenant.name) & sessions.c.finished.is_(None)

        def work(connection: Connection) -> bool:
            count = connection.execute(select(func.count()).select_from(sessions).where(is_open)).scalar_one()
            if count < tenant.max_sessions:
                connection.execute(insert(sessions).values(row))
            return count < tenant.max_sessions

        if not await self._database.run(work):
            raise UserError(
                f"you have {tenant.max_sessions} open sessions, as many as you may; close clients that you are done "
                f"with. One that died without closing ends after {SILENT_S:g} s"
            )
        return session

    async def beat(self, tenant: str, session: str) -> None:
        """Record that a client lives. UnknownError, FinishedError: see `open_one`."""
        await self.open_one(tenant, session)
        change = update(sessions).where(sessions.c.id == session).values(seen=time.time())
        await self._database.run(lambda c: c.execute(change))

    async def open_one(self, tenant: str, session: str) -> Row[Any]:
        """Return a session that has not ended. UnknownError: none; FinishedError: it has ended."""
        row = await self._mine(sessions, "session", tenant, session)
        if row.finished is not None:
            raise FinishedError(f"session {session} has ended: {row.finished}")
        return row

    async def finish(self, tenant: str, session: str, reason: str) -> list[tuple[str, str]]:
        """End a session. Return `(tenant, model)` of its models to drop. UnknownError: no such session."""
        await self._mine(sessions, "session", tenant, session)
        this = sessions.c.id == session
        return await self._database.run(lambda c: _end(c, this, reason, this))

    async def silent(self) -> list[tuple[str, str]]:
        """End sessions whose clients are gone. Return `(tenant, model)` to drop for all ended sessions."""
        old = sessions.c.finished.is_(None) & (sessions.c.seen < time.time() - SILENT_S)
        ended = sessions.c.finished.is_not(None)
        return await self._database.run(lambda c: _end(c, old, "its client sent no heartbeat", ended))

    async def listed(self, tenant: str, limit: int, offset: int) -> list[str]:
        """Return a tenant's session ids, newest first."""
        mine = select(sessions.c.id).where(sessions.c.tenant == tenant).order_by(sessions.c.created.desc())
        return await self._database.run(lambda c: list(c.execute(mine.limit(limit).offset(offset)).scalars()))

    async def described(self, tenant: str, session: str) -> dict[str, Any]:
        """Return a session as the SDK's `GetSessionResponse`. UnknownError: no such session."""
        row = await self._mine(sessions, "session", tenant, session)

        def ids(connection: Connection, table: Table) -> list[str]:
            return list(connection.execute(select(table.c.id).where(table.c.session == session)).scalars())

        runs, drawn = await self._database.run(lambda c: (ids(c, models), ids(c, samplers)))
        about: Mapping[str, Any] = row.about
        return {
            "training_run_ids": runs,
            "sampler_ids": drawn,
            "user_metadata": _texts(about.get("user_metadata")),
            "display_name": about.get("display_name"),
        }

    # --- models ------------------------------------------------------------------------------------------------------

    async def model(self, tenant: str, model: str) -> Row[Any]:
        """Return a tenant's model. UnknownError: no such model."""
        return await self._mine(models, "model", tenant, model)

    async def runs(self, tenant: str, limit: int, offset: int, project: str | None = None) -> dict[str, Any]:
        """Return the SDK's `TrainingRunsResponse`, of one project or of all."""
        mine = models.c.tenant == tenant
        if project is not None:
            of_project = sessions.c.about["project_id"].as_string() == project
            mine &= models.c.session.in_(select(sessions.c.id).where(of_project))
        found = select(models).where(mine).order_by(models.c.created.desc()).limit(limit).offset(offset)

        def work(connection: Connection) -> tuple[list[dict[str, Any]], int]:
            rows = [run_as_json(connection, row) for row in connection.execute(found).all()]
            return rows, connection.execute(select(func.count()).select_from(models).where(mine)).scalar_one()

        rows, total = await self._database.run(work)
        return {"training_runs": rows, "cursor": {"offset": offset, "limit": limit, "total_count": total}}

    async def run(self, tenant: str, model: str) -> dict[str, Any]:
        """Return a model as the SDK's `TrainingRun`. UnknownError: no such model."""
        row = await self.model(tenant, model)
        return await self._database.run(lambda c: run_as_json(c, row))

    # --- samplers ----------------------------------------------------------------------------------------------------

    async def add_sampler(self, sampler: Mapping[str, Any]) -> None:
        """Add a sampler, if it does not exist yet."""
        await self._database.run(lambda connection: put_sampler(connection, sampler))

    async def sampler(self, tenant: str, sampler: str) -> Row[Any]:
        """Return a tenant's sampler. UnknownError: no such sampler."""
        return await self._mine(samplers, "sampler", tenant, sampler)

    async def join(self, tenant: str, sampler: str) -> int:
        """Return a new client number for a sampler. Its creator has 0. UnknownError: no such sampler."""
        mine = (samplers.c.id == sampler) & (samplers.c.tenant == tenant)
        change = update(samplers).where(mine).values(clients=samplers.c.clients + 1).returning(samplers.c.clients)
        number = await self._database.run(lambda c: c.execute(change).scalar())
        if number is None:
            raise UnknownError(f"you have no sampler {sampler[:200]}")
        return number

    async def source(self, tenant: str, sampler: str) -> Source:
        """Return the source of a tenant's sampler. UnknownError: no such sampler."""
        known = self._known.get(sampler)
        if known is None:
            row = await self._mine(samplers, "sampler", tenant, sampler)
            if len(self._known) >= KNOWN:
                self._known.clear()
            known = self._known[sampler] = tenant, Source(row.adapter, row.folder)
        if known[0] != tenant:
            raise UnknownError(f"you have no sampler {sampler}")
        self._used[sampler] = time.time()
        return known[1]

    async def unused_folders(self) -> list[str]:
        """Save the times of use. Return the folders without a checkpoint that were unused for `UNUSED_S`.

        Their samplers lose the folder, so they end when the fleet evicts their adapters.
        """
        used, self._used = self._used, {}
        s = samplers.c
        named = s.folder.in_(select(checkpoints.c.folder))
        old = s.folder.is_not(None) & ~named & (s.used < time.time() - UNUSED_S)

        def work(connection: Connection) -> list[str]:
            for sampler, at in used.items():
                connection.execute(update(samplers).where(s.id == sampler).values(used=at))
            latest = select(s.folder).where(s.folder.is_not(None) & ~old)
            gone = old & s.folder.not_in(latest)  # samplers of kind inflight share a folder
            folders = list(connection.execute(select(s.folder).where(gone).distinct()).scalars())
            connection.execute(update(samplers).where(s.folder.in_(folders)).values(folder=None))
            return folders

        folders = await self._database.run(work)
        if folders:
            self._known.clear()
        return folders

    async def forget(self) -> None:
        """Drop sessions that ended two days ago, with their samplers and models. No result is kept for so long.

        A session stays with a model that the learner or a checkpoint has, and with a sampler that is used or has files
        of its own.
        """
        now, m, s = time.time(), models.c, samplers.c
        own_files = s.folder.is_not(None) & s.folder.not_in(select(checkpoints.c.folder))
        needed = select(m.session).where(m.live | m.id.in_(select(checkpoints.c.model)))
        needed = needed.union(select(s.session).where(own_files | (s.used > now - UNUSED_S)))
        long_ago = sessions.c.finished.is_not(None) & (sessions.c.seen < now - 2 * KEEP_S)
        found = select(sessions.c.id).where(long_ago & sessions.c.id.not_in(needed))
        dropped = [delete(column.table).where(column.in_(found)) for column in (s.session, m.session, sessions.c.id)]
        await self._database.run(lambda c: [c.execute(each) for each in dropped])
        self._known.clear()  # other processes drop rows too

    # --- facts that processes share ----------------------------------------------------------------------------------

    async def fact(self, name: str) -> Any:
        """Return a fact that a process has published, or None."""
        return await self._database.run(lambda c: c.execute(select(facts.c.value).where(facts.c.name == name)).scalar())

    async def publish(self, name: str, value: Any) -> None:
        """Publish a fact to the other processes."""
        await self._database.run(lambda connection: put_fact(connection, name, value))

    async def _mine(self, table: Table, what: str, tenant: str, given: str) -> Row[Any]:
        mine = select(table).where((table.c.id == given) & (table.c.tenant == tenant))
        row = await self._database.run(lambda c: c.execute(mine).first())
        if row is None:
            raise UnknownError(f"you have no {what} {given[:200]}")
        return row


def new_model(tenant: Tenant, model: str, session: str, base_model: str, lora: Any, user_metadata: Any) -> Also:
    """Return the change that adds a model which the learner does not have yet.

    The change raises UserError if its tenant has as many models as it may.
    """
    now = time.time()
    row = {
        "id": model, "session": session, "tenant": tenant.name, "created": now, "used": now, "base_model": base_model,
        "lora": lora, "user_metadata": _texts(user_metadata), "live": False, "steps": 0, "gradient": False,
    }  # fmt: skip
    ended = select(sessions.c.id).where(sessions.c.finished.is_not(None))  # their models will be dropped
    mine = (models.c.tenant == tenant.name) & _HELD & models.c.session.not_in(ended)

    def add(connection: Connection) -> None:
        if connection.execute(select(func.count()).select_from(models).where(mine)).scalar_one() >= tenant.max_models:
            raise UserError(
                f"you have {tenant.max_models} models in training, as many as you may; close the clients of those that "
                f"you are done with. Those of a client that died without closing end after {SILENT_S:g} s"
            )
        connection.execute(insert(models).values(row))

    return add


def put_fact(connection: Connection, name: str, value: Any) -> None:
    """Add a fact, or replace its value."""
    if not connection.execute(update(facts).where(facts.c.name == name).values(value=value)).rowcount:
        connection.execute(insert(facts).values(name=name, value=value))


def put_sampler(connection: Connection, sampler: Mapping[str, Any]) -> None:
    """Add a sampler, if it does not exist yet."""
    if connection.execute(select(samplers.c.id).where(samplers.c.id == sampler["id"])).first() is None:
        now = time.time()
        connection.execute(insert(samplers).values(created=now, used=now, **sampler))


def run_as_json(connection: Connection, row: Row[Any]) -> dict[str, Any]:
    """Return a row as the SDK's `TrainingRun`."""

    def last(kind: str) -> dict[str, Any] | None:
        of_kind = (checkpoints.c.model == row.id) & (checkpoints.c.kind == kind)
        newest = select(checkpoints).where(of_kind).order_by(checkpoints.c.created.desc()).limit(1)
        found = connection.execute(newest).first()
        return None if found is None else as_json(found)

    return {
        "training_run_id": row.id,
        "base_model": row.base_model,
        "model_owner": row.tenant,
        "is_lora": True,
        "corrupted": row.lost is not None,
        "lora_rank": row.lora.get("rank"),
        "last_request_time": when(row.used),
        "last_checkpoint": last("weights"),
        "last_sampler_checkpoint": last("sampler_weights"),
        "user_metadata": row.user_metadata,
    }


def _end(
    connection: Connection, which: ColumnElement[bool], reason: str, ended: ColumnElement[bool]
) -> list[tuple[str, str]]:
    """End sessions. Return `(tenant, model)` of the `ended` sessions' models that the learner has or will create."""
    connection.execute(update(sessions).where(which).values(finished=reason))
    found = select(models.c.tenant, models.c.id).join(sessions, sessions.c.id == models.c.session)
    return [(row.tenant, row.id) for row in connection.execute(found.where(ended & _HELD)).all()]


def _texts(given: Any) -> dict[str, str] | None:
    return None if given is None else {str(key): str(value) for key, value in given.items()}
