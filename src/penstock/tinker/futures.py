"""Futures of the service: accepted in order, kept on disk, awaited by polls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection, bindparam, delete, exists, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from penstock.aio import cancelled
from penstock.checks import LARGEST
from penstock.errors import PenstockError, StateError, UserError
from penstock.tinker.database import Database, futures, models, processes, samplers, sessions
from penstock.tinker.schema import JSON_TYPE
from penstock.tinker.tenants import Tenant, charge, discharge, take

HOLD_S = 30.0
"""Seconds until a poll is answered. The SDK gives up at 45 s, and polls again at once after an answer."""
FOLLOW_S = 0.1
"""Seconds between two reads of other processes' changes, while there are other processes."""
BEAT_S = 2.0
DEAD_S = 30.0
"""Seconds without a beat after which a process counts as dead. Others then take its samples."""
KEEP_RETRIEVED_S = 600.0
"""Seconds that a retrieved result is kept, for a client whose connection broke during the transfer."""
KEEP_S = 24 * 3600.0
"""Seconds that a result is kept if its client never fetches it."""
FORGET_S = 3600.0
"""Seconds in which a repeated request finds its future and does not run again. Clients repeat within minutes."""
MOST_READ = 100
"""Maximum number of operations that are read together. Each may have megabytes."""
MOST_TRIES = 30
"""Attempts to store an outcome, `BEAT_S` apart, in a database that takes other work. Then the future fails with its
reason. After as many again, what the operation changed is not recorded either."""
MAIN = "main"
"""Name of the process that reaches the learner. It runs the operations on models."""
SAMPLE = "sample"
PENDING, DONE, FAILED, GONE = "pending", "done", "failed", "gone"
logger = logging.getLogger(__name__)

Also = Callable[[Connection], None]

# Built once, because building a statement costs more than SQLite takes to run it.
_ADD = {
    dialect.dialect.name: dialect.insert(futures)
    .on_conflict_do_nothing(index_elements=["id"])
    .returning(futures.c.number)
    for dialect in (sqlite, postgresql)
}
_END = (
    update(futures)
    .where((futures.c.id == bindparam("of")) & (futures.c.state == PENDING))
    .values(
        {name: bindparam(name) for name in ("state", "result", "content_type", "error", "category", "finished", "size")}
    )
    .values(body=None)
)
_ANOTHER = select(processes.c.name).where(processes.c.name != MAIN).limit(1)
_SEEN = update(processes).where(processes.c.name == bindparam("of")).values(seen=bindparam("at"))
_RETRIEVED = update(futures).where(futures.c.id == bindparam("of")).values(retrieved=bindparam("at"))


@dataclass(frozen=True, slots=True)
class Operation:
    """The request behind a future.

    Attributes:
        id: id of the future: scope and the client's sequence number, so that a repeated request finds it.
        kind: `sample`, or the learner's name of the operation.
        scope: model or sampler of the operation. Operations of one model run in the order of arrival.
        number: place in the order of arrival over all futures.
    """

    id: str
    tenant: str
    kind: str
    scope: str
    body: bytes
    number: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result in the form for the client, or the reason for its absence.

    Attributes:
        category: the SDK's category of an error, `user` or `server`.
        also: further change to the database in the same transaction.
        after: called once the outcome is stored.
    """

    data: bytes = b"{}"
    content_type: str = JSON_TYPE
    error: str | None = None
    category: str = "server"
    also: Also | None = field(default=None, compare=False)
    after: Callable[[], Awaitable[object]] | None = field(default=None, compare=False)


async def outcome_of(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Return the outcome of `work`, even if it raises. An unfinished future would make its client wait for ever."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await cancelled(task)
        raise
    error = None if task.cancelled() else task.exception()
    if error is None:
        return task.result()
    if isinstance(error, PenstockError):
        return Outcome(error=str(error), category="user" if isinstance(error, UserError) else "server")
    logger.error("an operation failed", exc_info=error)
    return Outcome(error=f"the service failed: {error!r}")


class GoneError(Exception):
    """The result was dropped, or the future never existed. The client then sends a sample again."""


@dataclass(slots=True)
class _Running:
    tenant: str
    done: asyncio.Future[Outcome]
    task: asyncio.Task[None]


class Futures:
    """The futures of all processes on one database. This process runs those whose executor it is.

    Args:
        executor: name of this process. After a restart under the same name, it continues its futures.
        work: runs an operation of this process. Samples run at once, operations of one model one after another in the
            order of arrival.
    """

    def __init__(
        self,
        database: Database,
        executor: str,
        work: Callable[[Operation], Coroutine[Any, Any, Outcome]],
        *,
        hold_s: float = HOLD_S,
    ) -> None:
        self.executor = executor
        self._database = database
        self._work = work
        self._hold_s = hold_s
        self._running: dict[str, _Running] = {}
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        """By model. Its operations hold the lock, or wait for it in their order."""
        self._foreign = WeakValueDictionary[str, asyncio.Event]()
        """Set once the future has ended in another process. Its polls hold the event, and one read serves them all."""
        self._others = self._released = False
        self._follower: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Resume the unfinished futures of this process, and follow the other processes."""
        await self._beat()
        await self._take_up()
        self._follower = asyncio.create_task(self._follow(), name="tinker-futures")

    async def close(self) -> None:
        """Stop. Pending futures stay in the database for the next process of this name.

        Operations under way in a learner continue there, and are answered again later.
        """
        if self._follower is not None:
            await cancelled(self._follower)
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()  # all before one ends, so that no next operation of a model begins
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._database.run(lambda c: c.execute(delete(processes).where(processes.c.name == self.executor)))

    async def release(self) -> None:
        """Answer every held poll, because the process ends."""
        self._released = True
        for running in self._running.values():
            running.done.cancel()
        for changed in self._foreign.values():
            changed.set()

    async def accept(
        self,
        operation: Operation,
        also: Also | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        """Append an operation to the order, unless it was accepted before. This process runs samples, `MAIN` others.

        Args:
            operation: the operation; its `number` is ignored.
            also: further change to the database in the same transaction.
            tenant: tenant whose limits apply; None: no limits, for the service's own operations.

        Raises:
            QuotaError: the tenant must wait. UserError: it would wait for ever.
        """
        runs, size = self.executor if operation.kind == SAMPLE else MAIN, len(operation.body)
        limits = tenant or Tenant(operation.tenant, max_queued=LARGEST, max_bytes=LARGEST)
        if size > limits.max_bytes:
            raise UserError(
                f"this request has {size} bytes, and all of yours together may have {limits.max_bytes} (max_bytes); "
                "send it in smaller parts"
            )
        row = {name: getattr(operation, name) for name in ("id", "tenant", "kind", "scope", "body")}
        row |= {"executor": runs, "arrived": time.time(), "state": PENDING, "size": size}

        def work(connection: Connection) -> tuple[int | None, bool]:
            number = connection.execute(_ADD[connection.dialect.name], row).scalar()
            if number is not None:
                take(connection, limits, size)
                if also is not None:
                    also(connection)
            return number, runs == MAIN and connection.execute(_ANOTHER).first() is not None

        number, has_others = await self._database.run(work)
        if number is None or runs != self.executor:
            return
        if has_others:
            await self._take_up()  # another process may have accepted earlier operations of the model
        else:
            self._begin([replace(operation, number=number)])

    async def finish(self, operation: Operation, outcome: Outcome) -> str | None:
        """Store an outcome, and answer the polls that wait for it. Return why it is not stored; None: it is."""
        result = None if outcome.error is not None else outcome.data
        values = {
            "of": operation.id, "state": DONE if outcome.error is None else FAILED, "result": result,
            "content_type": outcome.content_type, "error": outcome.error, "category": outcome.category,
            "finished": time.time(), "size": len(result or b""),
        }  # fmt: skip

        def work(connection: Connection) -> None:
            if connection.execute(_END, values).rowcount:
                charge(connection, operation.tenant, -1, len(result or b"") - len(operation.body))
                if outcome.also is not None:
                    outcome.also(connection)

        try:
            await self._database.run(work)
        except (StateError, ValueError) as error:  # the future stays pending; a driver may raise ValueError of a text
            logger.error("the outcome of %s cannot be kept: %s", operation.id, error)  # noqa: TRY400 - for people
            return str(error)
        else:
            return None
        finally:
            running = self._running.get(operation.id)
            if running is not None and not running.done.done():
                running.done.set_result(outcome)

    async def retrieve(self, tenant: str, request_id: str) -> Outcome | None:
        """Wait for an outcome, or return None after `hold_s` seconds without one.

        Raises:
            GoneError: the tenant has no such future, or its result was dropped.
        """
        running = self._running.get(request_id)
        if running is not None and running.tenant == tenant:
            await asyncio.wait((running.done,), timeout=self._hold_s)
            if running.done.done() and not running.done.cancelled():
                return self._retrieved(request_id, running.done.result())
            return None
        changed = self._foreign.setdefault(request_id, asyncio.Event())
        if (
            outcome := await self._stored(tenant, request_id)
        ) is None and not self._released:  # another process runs it
            with suppress(TimeoutError):
                async with asyncio.timeout(self._hold_s):
                    await changed.wait()
            outcome = await self._stored(tenant, request_id)
        return None if outcome is None else self._retrieved(request_id, outcome)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Fail a future as cancelled. An ended future stays as it is. GoneError: the tenant has no such future.

        UserError: the future is not a sample.
        """
        running = self._running.get(request_id)
        wanted = select(futures.c.tenant, futures.c.kind, futures.c.body).where(futures.c.id == request_id)
        row = await self._database.run(lambda c: c.execute(wanted).first())
        if row is None or row.tenant != tenant:
            raise GoneError
        if row.kind != SAMPLE:
            raise UserError(f"{request_id} is {row.kind}; samples alone can be cancelled")
        cut = Operation(request_id, tenant, SAMPLE, "", row.body or b"")
        await self.finish(cut, Outcome(error="cancelled by the client", category="user"))
        if running is not None:
            running.task.cancel()

    async def prune(self) -> None:
        """Drop results that were fetched, are too old, or belong to an ended session."""
        now, f = time.time(), futures.c
        scopes = [
            select(table.c.id).join(sessions, sessions.c.id == table.c.session).where(sessions.c.finished.is_not(None))
            for table in (models, samplers)
        ]
        ended = or_(*map(f.scope.in_, scopes)) & (f.finished < now - KEEP_RETRIEVED_S)
        fetched, old = f.retrieved < now - KEEP_RETRIEVED_S, f.finished < now - KEEP_S
        dropped = f.state.in_((DONE, FAILED)) & (fetched | old | ended)

        def work(connection: Connection) -> None:
            discharge(connection, dropped & (f.size > 0))
            connection.execute(update(futures).where(dropped).values(state=GONE, result=None, size=0))
            forgotten = (f.state == GONE) & (f.finished < now - FORGET_S)
            # A client knows of a model's loss once it has fetched a failure that came after the loss. Only that failure
            # records this. So clear the loss with it, or later operations would fail for the same loss.
            fetched_failure = f.error.is_not(None) & f.retrieved.is_not(None) & (f.finished >= models.c.lost_at)
            known = exists().where(forgotten & fetched_failure & (f.scope == models.c.id))
            connection.execute(update(models).where(known).values(lost=None, lost_at=None))
            connection.execute(delete(futures).where(forgotten))

        await self._database.run(work)

    def _begin(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.id in self._running:
                continue
            done = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(operation), name=f"tinker-{operation.id}")
            self._running[operation.id] = _Running(operation.tenant, done, task)
            task.add_done_callback(lambda _, of=operation.id: self._running.pop(of))

    async def _run(self, operation: Operation) -> None:
        model = operation.scope
        turn = nullcontext() if operation.kind == SAMPLE else self._turns.setdefault(model, asyncio.Lock())
        # A model's next operation begins once this outcome is stored. So its learner keeps the last answer alone.
        async with turn:
            outcome, tries = await outcome_of(self._work(operation)), 0
            while (why := await self.finish(operation, outcome)) is not None:
                await asyncio.sleep(BEAT_S)
                try:
                    seen = {"of": self.executor, "at": time.time()}
                    await self._database.run(lambda c, seen=seen: c.execute(_SEEN, seen))
                except StateError:  # the database is away, or its disk is full: that may pass
                    continue
                tries += 1
                if tries == MOST_TRIES:  # what it changed is true, so that is still recorded
                    did = "was done, but its result" if outcome.error is None else "failed, and its error"
                    error = f"{operation.kind} {did} cannot be kept: {why}"
                    outcome = replace(outcome, error=error, category="server")
                elif tries == 2 * MOST_TRIES:  # the record is refused too
                    outcome = Outcome(error=outcome.error)
        if outcome.after is not None:
            await outcome.after()

    def _retrieved(self, request_id: str, outcome: Outcome) -> Outcome:
        """Record that an outcome was fetched. A failure is recorded at once, as its model may then continue."""
        values = {"of": request_id, "at": time.time()}
        self._database.post(lambda c: c.execute(_RETRIEVED, values), at_once=outcome.error is not None)
        return outcome

    async def _stored(self, tenant: str, request_id: str) -> Outcome | None:
        f = futures.c
        wanted = select(f.tenant, f.state, f.error, f.category, f.result, f.content_type).where(f.id == request_id)
        row = await self._database.run(lambda c: c.execute(wanted).first())
        if row is None or row.tenant != tenant or row.state == GONE:
            raise GoneError
        if row.state == PENDING:
            return None
        if row.state == FAILED:
            return Outcome(error=row.error, category=row.category or "server")
        return Outcome(row.result, row.content_type)

    # --- other processes ---------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Poll for changes by other processes, because not every database sends events."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + BEAT_S
        while True:
            await asyncio.sleep(FOLLOW_S if self._others else BEAT_S)
            try:
                if loop.time() >= beat_at:
                    beat_at = loop.time() + BEAT_S
                    await self._beat()
                if self._others:
                    await self._take_up()
                if self._foreign:
                    await self._look_at_foreign()
            except StateError as error:  # for example a full disk, which may pass
                logger.warning("%s", error)

    async def _beat(self) -> None:
        """Record that this process lives, and take the samples of dead processes."""
        now, name = time.time(), self.executor

        def work(connection: Connection) -> bool:
            if not connection.execute(_SEEN, {"of": name, "at": now}).rowcount:
                connection.execute(insert(processes).values(name=name, seen=now))
            connection.execute(delete(processes).where(processes.c.seen < now - DEAD_S))
            alive = select(processes.c.name)
            orphans = (futures.c.state == PENDING) & (futures.c.kind == SAMPLE) & futures.c.executor.not_in(alive)
            taken = connection.execute(update(futures).where(orphans).values(executor=name)).rowcount
            return bool(taken) or len(connection.execute(alive).all()) > 1

        self._others = await self._database.run(work)

    async def _take_up(self) -> None:
        """Begin this process's pending futures. They are its own from before a restart, or another's."""
        f = futures.c
        mine = (f.state == PENDING) & (f.executor == self.executor)
        found = select(f.id).where(mine).order_by(f.number)
        ids = [row[0] for row in await self._database.run(lambda c: c.execute(found).all())]
        for first in range(0, len(new := [i for i in ids if i not in self._running]), MOST_READ):
            some = mine & f.id.in_(new[first : first + MOST_READ])
            rows = select(f.id, f.tenant, f.kind, f.scope, f.body, f.number).where(some).order_by(f.number)
            found_rows = await self._database.run(lambda c, rows=rows: c.execute(rows).all())
            self._begin([Operation(*row) for row in found_rows])

    async def _look_at_foreign(self) -> None:
        ended = select(futures.c.id).where(futures.c.id.in_(list(self._foreign)) & (futures.c.state != PENDING))
        for request_id in await self._database.run(lambda c: list(c.execute(ended).scalars())):
            if (changed := self._foreign.get(request_id)) is not None:
                changed.set()
