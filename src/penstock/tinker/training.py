"""Operations on models: the requests to the learner process, and the changes to the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, Row, Update, bindparam, delete, func, select, update

from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError, PenstockError, UserError
from penstock.http import MOST_DATA, HttpTransport, UnreachableError
from penstock.tinker.checkpoints import (
    Checkpoints,
    TinkerPath,
    checked_name,
    folder_of,
    record,
    sampler_folder,
    size_of,
)
from penstock.tinker.database import Database, facts, futures, models, sessions
from penstock.tinker.futures import Also, Operation, Outcome, outcome_of
from penstock.tinker.requests import CreateModel, LoadWeights, OptimStep, SaveForSampler, SaveWeights
from penstock.tinker.sessions import put_fact, put_sampler

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 20
"""Largest answer that the learner keeps until the model's next operation, although it is stored."""
OPERATION_S = 6 * 3600.0
"""Deadline of one operation, including its wait for other operations."""
ANSWER_S = 10.0
RETURN_S = 300.0
"""Seconds for a dead learner to come back, because its model must be loaded again."""
AGAIN_S = 0.25
REFUSED, FAILED, ANOTHER = 400, 409, 412
"""Statuses of an operation: it cannot be met; it failed; it was meant for another start. Any other is a death."""
START_HEADER = "X-Incarnation"
"""Header with the start of the learner for which an operation is meant."""
INCARNATION = "learner"
"""Name of the fact that holds the start of the learner that this service last saw."""


Post = Callable[[bytes], Awaitable[tuple[bytes, str]]]
"""Runs an operation in the learner with a body. It returns data and media type, and raises as `LearnerClient.post`."""


class RestartedError(Exception):
    """There is no learner, or another start of it. Nothing was done."""


class LearnerClient:
    """Posts operations to the learner process.

    Args:
        path: path of its socket; None: this process has no learner.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._http = HttpTransport("http://learner", server="the learner", unix_socket=path, most=MOST_DATA)

    async def post(self, operation: Operation, incarnation: str, body: bytes) -> tuple[bytes, str]:
        """Run an operation with `body`, or return its result if it ran before: the data and their media type.

        Raises:
            UserError: the operation cannot be met. PenstockError: it failed.
            RestartedError: nothing was done.
            EngineDeadError: the learner died, so it is unknown what it did. DeadlineError: it did not answer.
        """
        headers = {"X-Operation": operation.kind, "X-Model": operation.scope, START_HEADER: incarnation}
        path = f"/operations/{operation.id}"
        try:
            async with self._http.stream("POST", path, body, timeout_s=OPERATION_S, headers=headers) as reply:
                return await reply.read(), reply.content_type
        except UnreachableError as error:
            raise RestartedError from error
        except EngineHTTPError as error:
            if error.status == ANOTHER:
                raise RestartedError from error
            if error.status in {REFUSED, FAILED}:
                raise (UserError if error.status == REFUSED else PenstockError)(str(error)) from error
            raise EngineDeadError(f"the learner broke {operation.kind} off: {error}") from error  # it ends

    async def forget(self, operation: Operation) -> None:
        """Let the learner drop its answer, which is stored; if that fails, the next answer takes its place."""
        headers = {"X-Model": operation.scope}
        with suppress(PenstockError):
            await self._http.call("DELETE", f"/operations/{operation.id}", None, timeout_s=ANSWER_S, headers=headers)

    async def returned(self) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
        """Wait until the learner answers.

        Returns:
            A value that changes with each start of the learner, and its models by id, each with `steps` and its last
            save.

        Raises:
            EngineDeadError, DeadlineError: the learner does not answer within `RETURN_S` seconds.
        """
        if self._path is None:
            raise EngineDeadError("this process reaches no learner")
        end = asyncio.get_running_loop().time() + RETURN_S
        while True:
            try:
                state = await self._http.get("/models", timeout_s=ANSWER_S)
            except (EngineDeadError, DeadlineError):
                if asyncio.get_running_loop().time() > end:
                    raise
            else:
                return str(state["incarnation"]), state["models"]
            await asyncio.sleep(AGAIN_S)  # no event reports a process that another process starts

    async def close(self) -> None:
        """Close the connections. Operations under way continue in the learner."""
        await self._http.close()


class Training:
    """Runs the operations on models, those of one model one after another.

    If the learner dies, it comes back with each model as last saved or created. A model that lost something fails its
    operations with the reason, until the client has fetched one of these failures. Later operations continue from the
    restored state.
    """

    def __init__(self, database: Database, learner: LearnerClient, checkpoints: Checkpoints) -> None:
        self._database = database
        self._learner = learner
        self._checkpoints = checkpoints
        self._incarnation: str | None = None
        self._meeting = asyncio.Lock()

    async def run(self, operation: Operation) -> Outcome:
        """Run one operation and return its outcome."""
        outcome = await outcome_of(self._outcome(operation))
        if outcome.error is not None and operation.id == f"{operation.scope}:create":
            return replace(outcome, also=_forgotten(operation.scope))
        if len(outcome.data) > KEPT_BYTES:
            return replace(outcome, after=partial(self._learner.forget, operation))
        return outcome

    async def _outcome(self, operation: Operation) -> Outcome:
        work = {
            "create_model": self._create,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
            "optim_step": self._step,
        }.get(operation.kind, _pass_on)
        while True:
            incarnation = self._incarnation or await self._meet()
            row = await self._model(operation.scope)
            if (lost := await self._lost(row, operation)) is not None:
                return Outcome(error=lost)
            makes = operation.kind in {"create_model", "load_weights"} and row.finished is None
            if not (row.live or makes or operation.kind == "drop_model"):
                raise _missing(row.id)
            try:
                return await work(operation, row, partial(self._learner.post, operation, incarnation))
            except RestartedError:
                self._incarnation = None
            except (EngineDeadError, DeadlineError) as error:
                self._incarnation = None
                return Outcome(error=await self._note_death(operation.scope, error))

    # --- the operations ----------------------------------------------------------------------------------------------

    async def _create(self, operation: Operation, row: Row[Any], post: Post) -> Outcome:
        given = CreateModel.of(operation.body)
        if given.base_model != row.base_model:
            raise UserError(
                f"this service trains {row.base_model}, not {given.base_model!r}; ask get_server_capabilities"
            )
        if given.lora_config is None:
            raise UserError("create_model without lora_config would train all weights; this service trains LoRA alone")
        _refuse_optimizer(given.optimizer_config)
        await post(orjson.dumps({"lora_config": given.lora_config.model_dump()}))
        return _result({"model_id": row.id, "type": "create_model"}, _changed(row.id, live=True))

    async def _step(self, operation: Operation, row: Row[Any], post: Post) -> Outcome:
        given = OptimStep.of(operation.body)
        _refuse_optimizer(given.optimizer_params)
        answer = await post(orjson.dumps({"adam_params": given.adam_params}))
        return Outcome(*answer, also=_done(_STEPPED, row.id))

    async def _save(self, operation: Operation, row: Row[Any], post: Post) -> Outcome:
        given = SaveWeights.of(operation.body)
        path = TinkerPath(row.id, "weights", checked_name(given.path or f"auto-{operation.number}"))
        if not given.overwrite and await self._checkpoints.exists(path):
            raise UserError(f"{path} is there already; choose another name, or pass overwrite=True")
        return await self._save_to(path, given, operation, row, post)

    async def _save_for_sampler(self, operation: Operation, row: Row[Any], post: Post) -> Outcome:
        given = SaveForSampler.of(operation.body)
        if given.path is not None or given.sampling_session_seq_id is None:
            path = TinkerPath(row.id, "sampler_weights", checked_name(given.path or f"auto-{operation.number}"))
            if await self._checkpoints.exists(path):
                raise UserError(f"{path} is there already; choose another name")
            return await self._save_to(path, given, operation, row, post)
        sampler = f"{row.session}:sample:{given.sampling_session_seq_id}"
        name = "inflight" if given.kind == "inflight" else sampler
        adapter = f"{row.id}:inflight" if given.kind == "inflight" else sampler
        folder = sampler_folder(row.id, name)
        values = {
            "id": sampler, "session": row.session, "tenant": row.tenant, "base_model": row.base_model,
            "folder": folder, "adapter": adapter,
        }  # fmt: skip
        await post(orjson.dumps({"folder": str(self._checkpoints.at(folder)), "adapter_name": adapter}))
        result = {"type": operation.kind, "sampling_session_id": sampler}
        return _result(result, lambda connection: put_sampler(connection, values))

    async def _save_to(
        self, path: TinkerPath, given: SaveWeights, operation: Operation, row: Row[Any], post: Post
    ) -> Outcome:
        """Save under a path, which then names the new folder instead of the old one."""
        folder = folder_of(path, operation.number)
        written = self._checkpoints.at(folder)
        old = await self._checkpoints.row(path)  # first: once it is written, an error would leave it without a row
        await post(orjson.dumps({"folder": str(written), "adapter_name": None}))
        values = {
            "tenant": row.tenant, "folder": folder, "base_model": row.base_model, "lora": row.lora,
            "expires": None if given.ttl_seconds is None else time.time() + given.ttl_seconds,
            "size": await asyncio.to_thread(size_of, written), "user_metadata": given.user_metadata,
        }  # fmt: skip
        result = {"type": operation.kind, "path": str(path)}
        outcome = _result(result, lambda c: record(c, path, values))
        if old is None or old.folder == folder:
            return outcome
        return replace(outcome, after=lambda: self._checkpoints.delete(old.folder))

    async def _load(self, operation: Operation, row: Row[Any], post: Post) -> Outcome:
        given = LoadWeights.of(operation.body)
        _refuse_optimizer(given.optimizer_config)
        if given.weights_access_token is not None:
            raise UserError("weights_access_token: this service has no tokens for another's weights; publish them")
        saved = await self._checkpoints.find(operation.tenant, given.path, "weights")
        if given.base_model is not None and given.base_model != saved.base_model:
            raise UserError(f"{given.path} is of {saved.base_model}, and base_model is {given.base_model}")
        if saved.base_model != row.base_model:
            raise UserError(f"{given.path} is of {saved.base_model}; this service trains {row.base_model}")
        folder = str(self._checkpoints.at(saved.folder))
        await post(orjson.dumps({"folder": folder, "optimizer": given.optimizer}))
        result = {"path": given.path, "model_id": row.id, "type": "load_weights"}
        return _result(result, _changed(row.id, live=True, gradient=False, lora=saved.lora))

    # --- a learner that dies -----------------------------------------------------------------------------------------

    async def _model(self, model: str) -> Row[Any]:
        row = await self._database.run(lambda c: c.execute(_MODEL, {"of": model}).first())
        if row is None:
            raise _missing(model)
        return row

    async def _lost(self, row: Row[Any], operation: Operation) -> str | None:
        """Return why an operation must fail: its client has not seen its model's loss yet. Or None."""
        if row.lost is None or operation.kind in {"create_model", "drop_model"}:
            return None
        f = futures.c
        seen = select(func.min(f.retrieved)).where(
            (f.scope == row.id) & f.error.is_not(None) & (f.finished >= row.lost_at)
        )
        arrived = select(f.arrived).where(f.id == operation.id)

        def work(connection: Connection) -> bool:
            seen_at = connection.execute(seen).scalar()
            if seen_at is None or connection.execute(arrived).scalar_one() <= seen_at:
                return True
            _changed(row.id, lost=None, lost_at=None)(connection)
            return False

        return row.lost if await self._database.run(work) else None

    async def _note_death(self, model: str, error: EngineError) -> str:
        """Mark the model of an operation that the learner's death cut off. Return the reason."""
        reason = (
            f"{error}. The model goes on from its last save_state or load, or anew if it had none; what came after is "
            "lost. Call save_state more often, or repeat the steps since then"
        )
        await self._database.run(_changed(model, lost=reason, lost_at=time.time()))
        return reason

    async def _meet(self) -> str:
        """Wait until the learner answers. If it was restarted, record what each model has lost.

        Returns:
            The start of the learner that answers.

        Raises:
            EngineDeadError: the learner does not come back.
        """
        async with self._meeting:
            if self._incarnation is None:
                incarnation, held = await self._learner.returned()
                known = await self._database.run(lambda connection: _compare(connection, incarnation, held))
                await self._drop_half_made({model: held[model] for model in held.keys() - known}, incarnation)
                self._incarnation = incarnation
            return self._incarnation

    async def _drop_half_made(self, unknown: Mapping[str, Mapping[str, Any]], incarnation: str) -> None:
        """Drop models unknown to the database. Saved ones stay: this may be the wrong database."""
        if saved := sorted(model for model, state in unknown.items() if state.get("saved") is not None):
            logger.warning(
                "the learner holds saved models that the database does not know: %s. They and their files stay; is "
                "--database the one that this data folder had before?",
                ", ".join(saved),
            )
        for model in sorted(unknown.keys() - set(saved)):
            logger.warning("the learner drops %s, which was never saved: the database does not know it", model)
            with suppress(RestartedError):  # the next operation finds that out too
                await self._learner.post(Operation(f"{model}:unknown", "", "drop_model", model, b""), incarnation, b"")


# Built once, because building a statement costs more than SQLite takes to run it.
_MODEL = (
    select(models, sessions.c.finished)
    .join(sessions, sessions.c.id == models.c.session)
    .where(models.c.id == bindparam("of"))
)
_CHANGE = update(models).where(models.c.id == bindparam("of"))
_EVALUATED = _CHANGE.values(used=bindparam("at"), gradient=True)
_STEPPED = _CHANGE.values(used=bindparam("at"), gradient=False, steps=models.c.steps + 1)


async def _pass_on(operation: Operation, row: Row[Any], post: Post) -> Outcome:
    """Run an operation whose body and result the learner reads and writes: an evaluation, or the end of a model."""
    also = {
        "forward": None,
        "forward_backward": _done(_EVALUATED, row.id),
        "drop_model": _changed(row.id, live=False),
    }[operation.kind]
    return Outcome(*await post(operation.body), also=also)


def _result(values: Mapping[str, Any], also: Also) -> Outcome:
    return Outcome(orjson.dumps(values), also=also)


def _refuse_optimizer(given: Mapping[str, Any] | None) -> None:
    if (kind := (given or {}).get("type", "adamw")) != "adamw":
        raise UserError(f"optimizer {kind!r} is not supported here; use AdamParams, the default")


def _changed(model: str, **values: Any) -> Also:
    return _done(_CHANGE.values(used=bindparam("at"), **values), model)


def _forgotten(model: str) -> Also:
    """Return the change that removes a model that was never created."""
    never = delete(models).where((models.c.id == model) & ~models.c.live)
    return lambda connection: (connection.execute(never), None)[1]


def _missing(model: str) -> UserError:
    return UserError(f"model {model} is not there: its creation failed, or its session has ended")


def _done(change: Update, model: str) -> Also:
    values = {"of": model, "at": time.time()}
    return lambda connection: (connection.execute(change, values), None)[1]


def _compare(connection: Connection, incarnation: str, held: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Mark every model whose state differs from what its clients know. Return the ids of all models in the database."""
    there_are = set(connection.execute(select(models.c.id)).scalars())
    known = connection.execute(select(facts.c.value).where(facts.c.name == INCARNATION)).scalar()
    put_fact(connection, INCARNATION, incarnation)
    if known == incarnation:
        return there_are
    now = time.time()
    for row in connection.execute(select(models).where(models.c.live)).all():
        there = held.get(row.id)
        if there is None:
            reason = f"model {row.id} was lost with the learner, and had never been saved; create it again"
            _changed(row.id, live=False, lost=reason, lost_at=now)(connection)
        elif row.lost is not None or row.gradient or int(there.get("steps", -1)) != row.steps:
            steps = int(there.get("steps", 0))
            never = "was never saved by save_state: it starts anew"
            now_is = never if there.get("saved") is None else "is again as its last save_state or load left it"
            reason = row.lost or (
                f"the learner was started again. Model {row.id} {now_is}, at step {steps}; its state at step "
                f"{row.steps} is lost"
            )
            _changed(row.id, steps=steps, gradient=False, lost=reason, lost_at=row.lost_at or now)(connection)
    return there_are
