"""The learner process, `python -m penstock.tinker.learner_process`, trains all models.

It serves HTTP on a Unix socket. `POST /operations/ID` runs the operation in the header `X-Operation` on the model in
`X-Model`. It answers with the SDK's result, or with a status of `training.py` and the reason. If the ID of a
model's last operation is repeated, it waits for that operation or gets its answer. `DELETE /operations/ID` drops that
answer. 412 means that `X-Incarnation` names another start, so nothing was done. Operations of one model run in the
order of arrival; several models take turns. `GET /models` returns the models and the current start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import orjson
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.aio import cancelled, in_thread
from penstock.asgi import listening_at, serving_app
from penstock.checks import reading
from penstock.config import TrainConfig
from penstock.errors import LearnerError, PenstockError, UserError
from penstock.fleet.remote import FleetClient, RemoteAdapters
from penstock.router_settings import Section
from penstock.tinker.children import run_child
from penstock.tinker.models import ALPHA, Models
from penstock.tinker.schema import PROTO_TYPE
from penstock.tinker.training import ANOTHER, FAILED, REFUSED, START_HEADER
from penstock.tinker.training_data import Batch, Sizes, decode, encode, joined
from penstock.train.batching import default_device, micro_batch_tokens
from penstock.train.interface import AdamSpec, LoraSpec, Outputs
from penstock.train.ranks import Ranks

T = TypeVar("T")
logger = logging.getLogger(__name__)

TURN = 4
"""Micro-batches of one model before another model has its turn."""
ADAPTER_S = 120.0
"""Deadline for loading an adapter on every engine."""
_LOST = 70
"""Exit status after the loss of a device or a rank."""


class LearnerOptions(Section):
    """Options from the owner, as JSON in the last argument."""

    model: str
    """Checkpoint folder or hub name."""
    name: str
    """Name of the base model for clients."""
    folder: Path
    """This process's own folder, for what a restart needs."""
    socket: Path
    fleet: str
    """URL of the router of the fleet that samples."""
    max_rank: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    """Maximum number of tokens in one datum."""
    train: TrainConfig


@dataclass(slots=True, eq=False)
class Waiting:
    """A part of a batch that waits for the thread, and its outputs once a turn has evaluated it."""

    model: str
    part: Batch
    found: asyncio.Future[Outputs]

    @property
    def tokens(self) -> int:
        """Number of tokens in the part."""
        return sum(len(datum.input_ids) for datum in self.part.data)


@dataclass(slots=True)
class LearnerQueue:
    """Runs operations: each model's in order, and one at a time in the only thread.

    Args:
        adapters: adapters of the fleet that samples.
        turn_tokens: tokens of a large batch that are evaluated before other models have a turn.
    """

    models: Models
    adapters: RemoteAdapters
    sizes: Sizes
    thread: ThreadPoolExecutor
    turn_tokens: int = 65_536
    _free: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[Waiting] = field(default_factory=list[Waiting])
    _last: dict[str, asyncio.Task[Response]] = field(default_factory=dict[str, asyncio.Task[Response]])
    """By model: its last operation, which the next one waits for. The caller repeats no earlier one."""

    async def run(self, request_id: str, kind: str, model: str, body: bytes) -> Response:
        """Run an operation once, however often it is sent. It continues even if its caller stops waiting."""
        task = self._last.get(model)
        if task is None or task.get_name() != request_id:
            task = asyncio.create_task(self._run(task, kind, model, body), name=request_id)
            self._last[model] = task
        return await asyncio.shield(task)

    def forget(self, request_id: str, model: str) -> None:
        """Drop the answer of an operation that its caller will not repeat."""
        task = self._last.get(model)
        if task is not None and task.done() and task.get_name() == request_id:
            del self._last[model]

    async def _run(self, before: asyncio.Task[Response] | None, kind: str, model: str, body: bytes) -> Response:
        if before is not None:
            await asyncio.wait((before,))
        answer = await self._answer(kind, model, body)
        if model not in self.models.live:
            self._last.pop(model, None)
        return answer

    async def _answer(self, kind: str, model: str, body: bytes) -> Response:
        try:
            return await self._work(kind)(model, body)
        except LearnerError as error:
            _end(str(error))
        except PenstockError as error:
            return JSONResponse({"error": str(error)}, REFUSED if isinstance(error, UserError) else FAILED)
        except Exception as error:  # torch may raise anything; one tenant's failure must not end other operations
            logger.exception("%s of %s failed", kind, model)
            if "CUDA error" in str(error):
                _end(str(error))  # after this, no kernel of this process runs
            first = str(error).strip().split("\n", 1)[0]
            return JSONResponse({"error": f"{kind} failed in the learner: {type(error).__name__}: {first}"}, FAILED)

    def _work(self, kind: str) -> Callable[[str, bytes], Awaitable[Response]]:
        return {
            "create_model": self._create,
            "forward_backward": self._add_gradient,
            "forward": self._evaluate,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
            "drop_model": self._drop,
        }[kind]

    async def _create(self, model: str, body: bytes) -> Response:
        spec = spec_of(orjson.loads(body)["lora_config"])
        await self._in_thread(lambda: self.models.create(model, spec))
        return Response()

    async def _add_gradient(self, model: str, body: bytes) -> Response:
        try:
            return await self._evaluate(model, body)
        except PenstockError as error:  # the SDK sends a large batch in parts: others may already be in the gradient
            self.models.void(model, str(error))
            raise

    async def _evaluate(self, model: str, body: bytes) -> Response:
        batch = await in_thread(lambda: decode(body, self.sizes))
        # Other models have their turns between two parts.
        found = [await self._evaluate_part(model, part) for part in batch.parts(self.turn_tokens)]
        data = await in_thread(lambda: encode(batch, joined(found)))
        return Response(data, media_type=PROTO_TYPE)

    async def _evaluate_part(self, model: str, part: Batch) -> Outputs:
        """Evaluate a part, together with other models' parts that wait at the same time."""
        mine = Waiting(model, part, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        async with self._free:
            if not mine.found.done():
                await self._take_turn(self._with_others(mine))
        return mine.found.result()

    def _with_others(self, mine: Waiting) -> list[Waiting]:
        """Return the parts to evaluate in one turn with `mine`, within its tokens."""
        chosen, room = [mine], self.turn_tokens - mine.tokens
        if mine.part.forward_only or not self.models.learner.joins:
            return chosen
        for other in self._waiting:
            if other is not mine and not other.part.forward_only and other.tokens <= room:
                chosen.append(other)
                room -= other.tokens
        return chosen

    async def _take_turn(self, parts: Sequence[Waiting]) -> None:
        """Evaluate parts in shared passes. If that fails, each is evaluated alone and fails alone."""
        self._waiting = [each for each in self._waiting if each not in parts]
        if len(parts) > 1:
            given = [(each.model, each.part) for each in parts]
            work = asyncio.ensure_future(self._hand_over(lambda: self.models.run_together(given)))
            await asyncio.wait([work])
            if work.exception() is None:
                for each, outputs in zip(parts, work.result(), strict=True):
                    each.found.set_result(outputs)
                return
        for each in parts:
            work = asyncio.ensure_future(self._hand_over(partial(self.models.run, each.model, each.part)))
            await asyncio.wait([work])
            if (error := work.exception()) is not None:
                each.found.set_exception(error)
            else:
                each.found.set_result(work.result())

    async def _step(self, model: str, body: bytes) -> Response:
        with reading("adam_params"):
            adam = AdamSpec(**orjson.loads(body)["adam_params"])
        grad_norm = await self._in_thread(lambda: self.models.step(model, adam))
        return JSONResponse({"metrics": {"grad_norm:mean": grad_norm}})

    async def _save(self, model: str, body: bytes) -> Response:
        folder = Path(orjson.loads(body)["folder"])
        await self._in_thread(lambda: self.models.save(model, folder))
        return Response()

    async def _save_for_sampler(self, model: str, body: bytes) -> Response:
        values = orjson.loads(body)
        folder, adapter = Path(values["folder"]), values["adapter_name"]
        began = time.perf_counter()
        write = await self._in_thread(lambda: self.models.writer(model))
        await asyncio.to_thread(write, folder)
        if adapter is not None:
            written = time.perf_counter()
            report = await self.adapters.load(adapter, str(folder), ADAPTER_S, fixed=True)
            took = written - began, time.perf_counter() - written, 0.0 if report is None else report.bubble
            logger.info("%s: written in %.3f s, on the engines in %.3f s, which stopped for %.3f s", adapter, *took)
        return Response()

    async def _load(self, model: str, body: bytes) -> Response:
        values = orjson.loads(body)
        folder, optimizer = Path(values["folder"]), values["optimizer"]
        await self._in_thread(lambda: self.models.load(model, folder, optimizer=optimizer))
        return Response()

    async def _drop(self, model: str, _: bytes) -> Response:
        await self._in_thread(lambda: self.models.drop(model))
        return Response()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._free:  # callers take turns
            return await self._hand_over(work)

    async def _hand_over(self, work: Callable[[], T]) -> T:
        """Run work in the thread, which must be free."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)


def spec_of(lora: Mapping[str, Any]) -> LoraSpec:
    """Return the adapter described by the SDK's `LoraConfig`."""
    flags = {name: bool(lora.get(name, True)) for name in ("train_attn", "train_mlp", "train_unembed")}
    seed = lora.get("seed")
    return LoraSpec(
        rank=int(lora["rank"]), alpha=ALPHA, seed=secrets.randbits(31) if seed is None else int(seed), **flags
    )


def build_app(queue: LearnerQueue) -> Starlette:
    """Build the process's HTTP application."""
    incarnation = f"{os.getpid()}-{time.time_ns()}"

    async def operate(request: Request) -> Response:
        headers = request.headers
        kind, model = headers.get("X-Operation", ""), headers.get("X-Model", "")
        if headers.get(START_HEADER, incarnation) != incarnation:
            return Response("this is another start of the learner", ANOTHER)
        return await queue.run(request.path_params["request_id"], kind, model, await request.body())

    async def forget(request: Request) -> Response:
        queue.forget(request.path_params["request_id"], request.headers.get("X-Model", ""))
        return Response()

    async def models(_: Request) -> Response:
        return JSONResponse({"incarnation": incarnation, "models": queue.models.status()})

    path = "/operations/{request_id:path}"
    return Starlette(
        routes=[
            Route(path, operate, methods=["POST"]),
            Route(path, forget, methods=["DELETE"]),
            Route("/models", models),
        ]
    )


@asynccontextmanager
async def _serve(given: str) -> AsyncGenerator[str]:
    options = LearnerOptions.model_validate_json(given)
    async with AsyncExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="learner"))
        ranks = await stack.enter_async_context(Ranks(options.train.ranks, options.socket.parent / "logs", {}))
        learner = await ranks.load(options.model, options.train, seed=0)
        models = Models(learner, options.folder / "models", options.name, options.max_rank)
        await asyncio.get_running_loop().run_in_executor(thread, models.restore)
        client = await stack.enter_async_context(FleetClient.to(options.fleet))
        sizes = Sizes(options.vocabulary, options.max_tokens)
        turn = TURN * micro_batch_tokens(options.train, default_device())
        app = build_app(LearnerQueue(models, RemoteAdapters(client.call), sizes, thread, turn))
        watch = asyncio.create_task(_end_with(ranks), name="watch-ranks")
        stack.push_async_callback(cancelled, watch)
        await stack.enter_async_context(serving_app(app, listening_at(options.socket, "the learner"), "the learner"))
        yield str(options.socket)


async def _end_with(ranks: Ranks) -> None:
    """End this process when a rank ends, because the model is then incomplete. The owner restarts the learner."""
    try:
        await ranks.during(asyncio.Event().wait())
    except LearnerError as error:
        _end(str(error))


def _end(reason: str) -> NoReturn:
    logger.error("the learner ends: %s", reason)
    os._exit(_LOST)


if __name__ == "__main__":
    sys.exit(run_child(_serve))
