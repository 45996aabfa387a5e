"""The HTTP API for the Tinker SDK, under `/api/v1`, and its process: `python -m penstock.tinker.api FD OPTIONS`."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.aio import in_thread
from penstock.asgi import listening, serving_app
from penstock.errors import PenstockError, UserError
from penstock.guard import cross_site
from penstock.router_settings import base_url
from penstock.tinker import requests as body
from penstock.tinker.checkpoints import MissingError, TinkerPath, as_json
from penstock.tinker.children import run_child
from penstock.tinker.database import DATABASE
from penstock.tinker.futures import SAMPLE, Also, GoneError, Operation
from penstock.tinker.requests import SMALL, Body, BodyBudget, RefusedError, most_of, read_body
from penstock.tinker.sampling import MOST_SAMPLES
from penstock.tinker.schema import JSON_TYPE
from penstock.tinker.service_state import About, Options, ServiceState, opened
from penstock.tinker.sessions import FinishedError, UnknownError, new_model
from penstock.tinker.tenants import QuotaError, Tenant, read_keys, refuse_open_service

PREFIX = "/api/v1"
KEY_HEADER = "X-API-Key"
MOST_PAGE = 1000

STATUS: Mapping[type[PenstockError], int] = {
    UnknownError: 404, MissingError: 404, FinishedError: 410, QuotaError: 429, UserError: 400, PenstockError: 503,
}  # fmt: skip
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Call(Generic[B]):
    """One call of a tenant.

    Attributes:
        data: body as it came.
        given: body as checked values; None: the call has none.
        path: parameters of the path.
        query: parameters behind the path.
    """

    tenant: Tenant
    method: str
    data: bytes
    given: B
    path: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def checkpoint(self) -> TinkerPath:
        """The checkpoint in the path. UserError: it is malformed."""
        return TinkerPath.of("tinker://{run}/{kind}/{name}".format(**self.path))

    def page(self, limit: int) -> tuple[int, int]:
        """Return limit and offset of a list. UserError: the query has wrong ones."""
        try:
            limit, offset = int(self.query.get("limit", limit)), int(self.query.get("offset", 0))
        except ValueError:
            raise UserError(f"limit and offset are whole numbers, got {dict(self.query)}") from None
        if not 0 < limit <= MOST_PAGE or not 0 <= offset < 1 << 63:
            raise UserError(f"limit is from 1 to {MOST_PAGE} and offset from 0 to 2^63 - 1, got {limit} and {offset}")
        return limit, offset


Handler = Callable[[Call[Any]], Awaitable[Any]]
"""Returns the answer, or its JSON values; None: an empty answer."""


def build_app(state: ServiceState) -> Starlette:
    """Build the ASGI application of an API process."""
    calls = _Calls(state)
    checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
    table: list[tuple[str, str, type[Body] | None, Handler]] = [
        ("POST", "asample", body.SampleAddress, calls.asample),  # these two come first: routes are tried in order
        ("POST", "retrieve_future", body.RequestBody, calls.retrieve_future),
        ("POST", "client/config", None, calls.client_config),
        ("POST", "client/dynamic_config", None, calls.dynamic_config),
        ("POST", "telemetry", None, calls.telemetry),
        ("GET", "get_server_capabilities", None, calls.capabilities),
        ("POST", "create_session", body.CreateSession, calls.create_session),
        ("POST", "session_heartbeat", body.SessionBody, calls.heartbeat),
        ("POST", "sessions/{session}/finish", body.FinishSession, calls.finish_session),
        ("GET", "sessions", None, calls.sessions),
        ("GET", "sessions/{session}", None, calls.session),
        ("POST", "create_model", body.CreateModel, calls.create_model),
        ("POST", "load_weights", body.LoadWeights, calls.load_weights),
        ("POST", "get_info", body.ModelBody, calls.get_info),
        ("POST", "forward_backward", body.TrainingBody, calls.forward_backward),
        ("POST", "optim_step", body.ModelBody, partial(calls.operation, "optim_step")),
        ("POST", "save_weights", body.ModelBody, partial(calls.operation, "save_weights")),
        ("POST", "save_weights_for_sampler", body.ModelBody, partial(calls.operation, "save_weights_for_sampler")),
        ("POST", "create_sampling_session", body.CreateSampler, calls.create_sampler),
        ("POST", "join_sampling_session", body.SamplerBody, calls.join_sampler),
        ("GET", "samplers/{sampler}", None, calls.sampler),
        ("POST", "cancel_future", body.RequestBody, calls.cancel_future),
        ("GET", "training_runs", None, calls.training_runs),
        ("GET", "training_runs/{run}", None, calls.training_run),
        ("GET", "training_runs/{run}/checkpoints", None, calls.run_checkpoints),
        ("GET", "checkpoints", None, calls.checkpoints),
        ("POST", "weights_info", body.CheckpointPath, calls.weights_info),
        ("DELETE", checkpoint, None, calls.delete_checkpoint),
        ("POST", f"{checkpoint}/publish", None, partial(calls.publish, True)),  # noqa: FBT003
        ("DELETE", f"{checkpoint}/publish", None, partial(calls.publish, False)),  # noqa: FBT003
        ("PUT", f"{checkpoint}/ttl", body.Ttl, calls.set_ttl),
    ]
    routes = [
        Route(f"{PREFIX}/{path}", calls.guarded(kind, handler), methods=[method])
        for method, path, kind, handler in table
    ]
    routes.append(Route(f"{PREFIX}/healthz", _health))  # probes have no key
    anything = Route("/{path:path}", calls.guarded(None, _unknown), methods=["GET", "POST", "PUT", "DELETE"])
    return Starlette(routes=[*routes, anything])


def error_answer(message: str, status: int) -> JSONResponse:
    """Return an error that the SDK shows. The SDK retries 408, 409, 429 and 5xx."""
    return JSONResponse({"error": message, "detail": message}, status)


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _unknown(call: Call[None]) -> Response:
    why = f"this service has no {call.method} /{call.path['path'].removeprefix('api/v1/')}"
    return error_answer(f"{why}; docs/tinker.md lists what it has", 404)


class _Calls:
    """Handlers of the API's calls."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._about = state.about
        self._sessions = state.sessions
        self._checkpoints = state.checkpoints
        self._bodies = BodyBudget()

    def guarded(self, kind: type[Body] | None, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: require a tenant's key, read the body, and answer errors in the SDK's form."""

        async def handle(http: Request) -> Response:
            try:
                self._state.tenants.refresh()
                tenant = self._tenant(http)
                with self._bodies.of(tenant.name) as take:
                    data = await read_body(http, most_of(kind, self._about.max_context_length), take)
                    given = None
                    if kind is not None:
                        given = kind.of(data) if len(data) <= SMALL else await in_thread(partial(kind.of, data))
                    found = await handler(Call(tenant, http.method, data, given, http.path_params, http.query_params))
            except RefusedError as error:
                return error_answer(str(error), error.status)
            except GoneError:
                return error_answer("there is no such future, or its result was dropped", 410)
            except PenstockError as error:
                status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
                return error_answer(str(error), status)
            if isinstance(found, Response):
                return found
            return Response(status_code=204) if found is None else Response(orjson.dumps(found), media_type=JSON_TYPE)

        return handle

    def _tenant(self, http: Request) -> Tenant:
        if self._state.tenants.open and (why := cross_site(http.headers.raw)) is not None:
            raise RefusedError(why, 403)
        tenant = self._state.tenants.of(http.headers.get(KEY_HEADER))
        if tenant is None:
            raise RefusedError(f"{KEY_HEADER} carries no key of this service; set TINKER_API_KEY", 401)
        return tenant

    # --- the service -------------------------------------------------------------------------------------------------

    async def client_config(self, _: Call[None]) -> Any:
        return {"pjwt_auth_enabled": False, "use_pyqwest_transport": True}

    async def dynamic_config(self, _: Call[None]) -> Any:
        return {"sample_cancel_enabled": True}

    async def telemetry(self, _: Call[None]) -> Any:
        return {"status": "accepted"}  # it is not kept

    async def capabilities(self, _: Call[None]) -> Any:
        model = {
            "model_name": self._about.base_model,
            "max_context_length": self._about.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def create_session(self, call: Call[body.CreateSession]) -> Any:
        session = await self._sessions.create(call.tenant, call.given)
        return {"type": "create_session", "session_id": session}

    async def heartbeat(self, call: Call[body.SessionBody]) -> Any:
        await self._sessions.beat(call.tenant.name, call.given.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, call: Call[body.FinishSession]) -> None:
        reason = f"its client finished: {call.given.reason.get('type', 'no reason')}"
        await self._state.drop_models(await self._sessions.finish(call.tenant.name, call.path["session"], reason))

    async def sessions(self, call: Call[None]) -> Any:
        return {"sessions": await self._sessions.listed(call.tenant.name, *call.page(20))}

    async def session(self, call: Call[None]) -> Any:
        return await self._sessions.described(call.tenant.name, call.path["session"])

    # --- training ----------------------------------------------------------------------------------------------------

    async def create_model(self, call: Call[body.CreateModel]) -> Any:
        lora = call.given.lora_config
        return await self._new_model("create_model", call, {} if lora is None else lora.model_dump())

    async def load_weights(self, call: Call[body.LoadWeights]) -> Any:
        if call.given.model_id is None:
            return await self._new_model("load_weights", call, {})
        await self._sessions.model(call.tenant.name, call.given.model_id)
        return await self._on_model("load_weights", call, call.given.model_id, call.given.seq_id)

    async def _new_model(self, kind: str, call: Call[body.CreateModel] | Call[body.LoadWeights], lora: Any) -> Any:
        """Accept the first operation of a model, and add its row."""
        given, tenant = call.given, call.tenant
        if given.session_id is None or given.model_seq_id is None:
            raise UserError(f"{kind} needs model_id, or session_id and model_seq_id")
        await self._sessions.open_one(tenant.name, given.session_id)
        model = f"{given.session_id}:train:{given.model_seq_id}"
        row = new_model(tenant, model, given.session_id, self._about.base_model, lora, given.user_metadata)
        return await self._accepted(Operation(f"{model}:create", tenant.name, kind, model, call.data), tenant, row)

    async def forward_backward(self, call: Call[body.TrainingBody]) -> Any:
        await self._sessions.model(call.tenant.name, call.given.model_id)
        kind = "forward" if call.given.forward_only else "forward_backward"
        return await self._on_model(kind, call, call.given.model_id, call.given.seq_id)

    async def operation(self, kind: str, call: Call[body.ModelBody]) -> Any:
        await self._sessions.model(call.tenant.name, call.given.model_id)
        return await self._on_model(kind, call, call.given.model_id, call.given.seq_id)

    async def _on_model(self, kind: str, call: Call[Any], model: str, seq_id: int | None) -> Any:
        """Accept an operation. Without a sequence number, a repeated request is not recognised."""
        request_id = f"{model}:{uuid.uuid4().hex if seq_id is None else seq_id}"
        return await self._accepted(Operation(request_id, call.tenant.name, kind, model, call.data), call.tenant)

    async def get_info(self, call: Call[body.ModelBody]) -> Any:
        row, about = await self._sessions.model(call.tenant.name, call.given.model_id), self._about
        return {
            "type": "get_info",
            "model_id": row.id,
            "model_name": row.base_model,
            "model_data": {"arch": about.arch, "model_name": row.base_model, "tokenizer_id": about.tokenizer},
            "is_lora": True,
            "lora_rank": row.lora.get("rank"),
        }

    # --- sampling ----------------------------------------------------------------------------------------------------

    async def create_sampler(self, call: Call[body.CreateSampler]) -> Any:
        given, tenant, base_model = call.given, call.tenant.name, self._about.base_model
        await self._sessions.open_one(tenant, given.session_id)
        sampler = f"{given.session_id}:sample:{given.sampling_session_seq_id}"
        row = {"id": sampler, "session": given.session_id, "tenant": tenant, "base_model": base_model}
        if given.model_path is not None:
            found = await self._checkpoints.find(tenant, given.model_path, "sampler_weights")
            adapter = found.path.removeprefix("tinker://") + found.folder[found.folder.rfind("@") :]
            row |= {"path": found.path, "adapter": adapter, "folder": found.folder}
        elif given.base_model != base_model:
            raise UserError(f"this service samples from {base_model}, not {given.base_model!r}")
        await self._sessions.add_sampler(row)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def join_sampler(self, call: Call[body.SamplerBody]) -> Any:
        number = await self._sessions.join(call.tenant.name, call.given.sampling_session_id)
        return {"type": "join_sampling_session", "client_counter": number}

    async def sampler(self, call: Call[None]) -> Any:
        row = await self._sessions.sampler(call.tenant.name, call.path["sampler"])
        return {"sampler_id": row.id, "base_model": row.base_model, "model_path": row.path}

    async def asample(self, call: Call[body.SampleAddress]) -> Any:
        sampler, seq_id = call.given.sampling_session_id, call.given.seq_id
        if sampler is None or seq_id is None:
            raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
        await self._sessions.source(call.tenant.name, sampler)
        operation = Operation(f"{sampler}:{seq_id}", call.tenant.name, SAMPLE, sampler, call.data)
        ids = [f"{operation.id}:{i}" for i in range(min(call.given.num_samples, MOST_SAMPLES))]
        await self._state.futures.accept(operation, None, call.tenant)
        return {"request_id": operation.id, "sample_sequence_ids": ids}

    # --- futures -----------------------------------------------------------------------------------------------------

    async def retrieve_future(self, call: Call[body.RequestBody]) -> Any:
        outcome = await self._state.futures.retrieve(call.tenant.name, call.given.request_id)
        if outcome is None:
            return {"type": "try_again", "request_id": call.given.request_id, "queue_state": "active"}
        if outcome.error is not None:
            return {"error": outcome.error, "category": outcome.category}
        return Response(outcome.data, media_type=outcome.content_type)

    async def cancel_future(self, call: Call[body.RequestBody]) -> None:
        await self._state.futures.cancel(call.tenant.name, call.given.request_id)

    async def _accepted(self, operation: Operation, tenant: Tenant, also: Also | None = None) -> Any:
        await self._state.futures.accept(operation, also, tenant)
        return {"request_id": operation.id, "model_id": operation.scope}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    async def training_runs(self, call: Call[None]) -> Any:
        return await self._sessions.runs(call.tenant.name, *call.page(20), call.query.get("project_id"))

    async def training_run(self, call: Call[None]) -> Any:
        return await self._sessions.run(call.tenant.name, call.path["run"])

    async def run_checkpoints(self, call: Call[None]) -> Any:
        await self._sessions.model(call.tenant.name, call.path["run"])
        rows, _ = await self._checkpoints.listed(call.tenant.name, call.path["run"], None, 0)
        return {"checkpoints": [as_json(row) for row in rows]}

    async def checkpoints(self, call: Call[None]) -> Any:
        limit, offset = call.page(100)
        rows, total = await self._checkpoints.listed(call.tenant.name, None, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return {"checkpoints": [as_json(row) for row in rows], "cursor": cursor}

    async def delete_checkpoint(self, call: Call[None]) -> None:
        await self._checkpoints.remove(call.tenant.name, call.checkpoint)

    async def publish(self, public: bool, call: Call[None]) -> None:  # noqa: FBT001
        await self._checkpoints.change(call.tenant.name, call.checkpoint, public=public)

    async def set_ttl(self, call: Call[body.Ttl]) -> None:
        ttl = call.given.ttl_seconds
        expires = None if ttl is None else time.time() + ttl
        await self._checkpoints.change(call.tenant.name, call.checkpoint, expires=expires)

    async def weights_info(self, call: Call[body.CheckpointPath]) -> Any:
        row = await self._checkpoints.find(call.tenant.name, call.given.tinker_path)
        flags = {name: row.lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": row.base_model, "is_lora": True, "lora_rank": row.lora.get("rank"), **flags}


# --- the process -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(options: Options, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Serve the API while the block runs, and yield its base URL. Port 0 picks a free port.

    Raises:
        ConfigError: the address or the database cannot be used, or the service would be open to anyone.
    """
    refuse_open_service(host, options.tenants)
    listener, what = listening(host, port, "the Tinker service"), "the Tinker service"
    async with opened(options) as state, serving_app(build_app(state), listener, what, state.futures.release):
        yield base_url(host, listener.getsockname()[1])


@asynccontextmanager
async def _serve(given: str) -> AsyncGenerator[str]:
    values: dict[str, Any] = orjson.loads(given)
    options = Options(
        data=Path(values["data"]),
        database=os.environ[DATABASE],
        tenants=read_keys(None if values["keys"] is None else Path(values["keys"])),
        learner=Path(values["learner"]),
        fleet=str(values["fleet"]),
        about=About(**values["about"]),
    )
    async with serving(options, host=values["host"], port=values["port"]) as url:
        yield url


if __name__ == "__main__":
    sys.exit(run_child(_serve))
