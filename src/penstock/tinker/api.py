"""The HTTP API for the Tinker SDK, under `/api/v1`, and its process: `python -m penstock.tinker.api FD OPTIONS`."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.asgi import listening, serving_app
from penstock.errors import PenstockError, UserError
from penstock.guard import cross_site
from penstock.tinker import requests as body
from penstock.tinker.checkpoints import MissingError, TinkerPath, as_json
from penstock.tinker.children import run_child
from penstock.tinker.database import DATABASE
from penstock.tinker.futures import SAMPLE, GoneError, Operation
from penstock.tinker.requests import MOST_BODY, BodyBudget, RefusedError, most_of_sample, read_body, training_request
from penstock.tinker.sampling import MOST_SAMPLES
from penstock.tinker.schema import JSON_TYPE
from penstock.tinker.service_state import About, Options, ServiceState, opened
from penstock.tinker.sessions import FinishedError, UnknownError, new_model
from penstock.tinker.tenants import QuotaError, Tenant, read_keys, refuse_open_service

PREFIX = "/api/v1"
KEY_HEADER = "X-API-Key"
MOST_PAGE = 1000

Handler = Callable[[Request, Tenant], Awaitable[Response]]


STATUS: Mapping[type[PenstockError], int] = {
    UnknownError: 404, MissingError: 404, FinishedError: 410, QuotaError: 429, UserError: 400, PenstockError: 503,
}  # fmt: skip


def build_app(state: ServiceState) -> Starlette:
    """Build the ASGI application of an API process."""
    calls = _Calls(state)
    posts = {
        "asample": calls.asample,  # these two come first, because routes are tried in order
        "retrieve_future": calls.retrieve_future,
        "client/config": calls.client_config,
        "client/dynamic_config": calls.dynamic_config,
        "telemetry": calls.telemetry,
        "create_session": calls.create_session,
        "session_heartbeat": calls.heartbeat,
        "sessions/{session}/finish": calls.finish_session,
        "create_model": calls.create_model,
        "get_info": calls.get_info,
        "forward_backward": calls.forward_backward,
        "optim_step": partial(calls.operation, "optim_step"),
        "save_weights": partial(calls.operation, "save_weights"),
        "save_weights_for_sampler": partial(calls.operation, "save_weights_for_sampler"),
        "load_weights": calls.load_weights,
        "create_sampling_session": calls.create_sampler,
        "join_sampling_session": calls.join_sampler,
        "cancel_future": calls.cancel_future,
        "weights_info": calls.weights_info,
        "training_runs/{run}/checkpoints/{kind}/{name}/publish": calls.publish,
    }
    gets = {
        "get_server_capabilities": calls.capabilities,
        "samplers/{sampler}": calls.sampler,
        "training_runs": calls.training_runs,
        "training_runs/{run}": calls.training_run,
        "training_runs/{run}/checkpoints": calls.run_checkpoints,
        "checkpoints": calls.checkpoints,
        "sessions": calls.sessions,
        "sessions/{session}": calls.session,
    }
    deletes = {
        "training_runs/{run}/checkpoints/{kind}/{name}": calls.delete_checkpoint,
        "training_runs/{run}/checkpoints/{kind}/{name}/publish": calls.publish,
    }
    puts = {"training_runs/{run}/checkpoints/{kind}/{name}/ttl": calls.set_ttl}
    table = (("POST", posts), ("GET", gets), ("DELETE", deletes), ("PUT", puts))
    return Starlette(
        routes=[
            Route(f"{PREFIX}/{path}", calls.guarded(handler), methods=[method])
            for method, handlers in table
            for path, handler in handlers.items()
        ]
        + [Route(f"{PREFIX}/healthz", calls.health)]  # probes have no key
        + [Route("/{path:path}", calls.guarded(calls.unknown), methods=["GET", "POST", "PUT", "DELETE"])]
    )


def error_answer(message: str, status: int) -> JSONResponse:
    """Return an error that the SDK shows. The SDK retries 408, 409, 429 and 5xx."""
    return JSONResponse({"error": message, "detail": message}, status)


class _Calls:
    """Handlers of the API's routes."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._bodies = BodyBudget()

    def guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: require a tenant's key, and answer errors in the SDK's form."""

        async def handle(http: Request) -> Response:
            try:
                await self._state.tenants.refresh()
                tenant = self._tenant(http)
                with self._bodies.of(tenant.name) as http.state.take:
                    return await handler(http, tenant)
            except RefusedError as error:
                return error_answer(str(error), error.status)
            except GoneError:
                return error_answer("there is no such future, or its result was dropped", 410)
            except PenstockError as error:
                status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
                return error_answer(str(error), status)

        return handle

    def _tenant(self, http: Request) -> Tenant:
        if self._state.tenants.open and (why := cross_site(http.headers.raw)) is not None:
            raise RefusedError(why, 403)
        tenant = self._state.tenants.of(http.headers.get(KEY_HEADER))
        if tenant is None:
            raise RefusedError(f"{KEY_HEADER} carries no key of this service; set TINKER_API_KEY", 401)
        return tenant

    # --- the service -------------------------------------------------------------------------------------------------

    async def unknown(self, http: Request, _: Tenant) -> Response:
        path = http.url.path.removeprefix(PREFIX)
        return error_answer(f"this service has no {http.method} {path}; docs/tinker.md lists what it has", 404)

    async def health(self, _http: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def client_config(self, _http: Request, _: Tenant) -> Response:
        return JSONResponse({"pjwt_auth_enabled": False, "use_pyqwest_transport": True})

    async def dynamic_config(self, _http: Request, _: Tenant) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, http: Request, _: Tenant) -> Response:
        await read_body(http, MOST_BODY)  # read, but not kept
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, _http: Request, _: Tenant) -> Response:
        about = await self._state.about()
        model = {
            "model_name": about.base_model,
            "max_context_length": about.max_context_length,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def create_session(self, http: Request, tenant: Tenant) -> Response:
        session = await self._state.sessions.create(tenant, body.CreateSession.of(await read_body(http)))
        return JSONResponse({"type": "create_session", "session_id": session})

    async def heartbeat(self, http: Request, tenant: Tenant) -> Response:
        await self._state.sessions.beat(tenant.name, body.SessionBody.of(await read_body(http)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, http: Request, tenant: Tenant) -> Response:
        given = body.FinishSession.of(await read_body(http))
        reason = f"its client finished: {given.reason.get('type', 'no reason')}"
        models = await self._state.sessions.finish(tenant.name, http.path_params["session"], reason)
        await self._state.drop_models(models)
        return Response(status_code=204)

    async def sessions(self, http: Request, tenant: Tenant) -> Response:
        limit, offset = _page(http, 20)
        return JSONResponse({"sessions": await self._state.sessions.listed(tenant.name, limit, offset)})

    async def session(self, http: Request, tenant: Tenant) -> Response:
        return JSONResponse(await self._state.sessions.described(tenant.name, http.path_params["session"]))

    # --- training ----------------------------------------------------------------------------------------------------

    async def create_model(self, http: Request, tenant: Tenant) -> Response:
        data = await read_body(http)
        given = body.CreateModel.of(data)
        lora = {} if given.lora_config is None else given.lora_config.model_dump()
        return await self._new_model("create_model", tenant, data, given, lora)

    async def load_weights(self, http: Request, tenant: Tenant) -> Response:
        data = await read_body(http)
        given = body.LoadWeights.of(data)
        if given.model_id is not None:
            await self._state.sessions.model(tenant.name, given.model_id)
            return await self._accepted(_on_model("load_weights", tenant, given.model_id, given.seq_id, data), tenant)
        return await self._new_model("load_weights", tenant, data, given, {})

    async def _new_model(
        self, kind: str, tenant: Tenant, data: bytes, given: body.CreateModel | body.LoadWeights, lora: dict[str, Any]
    ) -> Response:
        """Accept the first operation of a model, and add its row."""
        if given.session_id is None or given.model_seq_id is None:
            raise UserError(f"{kind} needs model_id, or session_id and model_seq_id")
        await self._state.sessions.open_one(tenant.name, given.session_id)
        model = f"{given.session_id}:train:{given.model_seq_id}"
        base_model = (await self._state.about()).base_model
        row = new_model(tenant, model, given.session_id, base_model, lora, given.user_metadata)
        return await self._accepted(Operation(f"{model}:create", tenant.name, kind, model, data), tenant, also=row)

    async def forward_backward(self, http: Request, tenant: Tenant) -> Response:
        data, message = await training_request(http)
        model, kind = message.model_id, "forward" if message.forward_only else "forward_backward"
        await self._state.sessions.own_model(tenant.name, model)
        return await self._accepted(_on_model(kind, tenant, model, message.seq_id or None, data), tenant)

    async def operation(self, kind: str, http: Request, tenant: Tenant) -> Response:
        data = await read_body(http)
        given = body.ModelBody.of(data)
        await self._state.sessions.own_model(tenant.name, given.model_id)
        return await self._accepted(_on_model(kind, tenant, given.model_id, given.seq_id, data), tenant)

    async def get_info(self, http: Request, tenant: Tenant) -> Response:
        row = await self._state.sessions.model(tenant.name, body.ModelBody.of(await read_body(http)).model_id)
        about = await self._state.about()
        data = {"arch": about.arch, "model_name": row.base_model, "tokenizer_id": about.tokenizer}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": row.id,
                "model_name": row.base_model,
                "model_data": data,
                "is_lora": True,
                "lora_rank": row.lora.get("rank"),
            }
        )

    # --- sampling ----------------------------------------------------------------------------------------------------

    async def create_sampler(self, http: Request, tenant: Tenant) -> Response:
        given = body.CreateSampler.of(await read_body(http))
        await self._state.sessions.open_one(tenant.name, given.session_id)
        sampler = f"{given.session_id}:sample:{given.sampling_session_seq_id}"
        about = await self._state.about()
        base = given.base_model if given.model_path is None else about.base_model
        if base != about.base_model:
            raise UserError(f"this service samples from {about.base_model}, not {given.base_model!r}")
        row = {"id": sampler, "session": given.session_id, "tenant": tenant.name, "base_model": about.base_model}
        if given.model_path is not None:
            found = await self._state.checkpoints.find(tenant.name, given.model_path, "sampler_weights")
            adapter = found.path.removeprefix("tinker://") + found.folder[found.folder.rfind("@") :]
            row |= {"path": found.path, "adapter": adapter, "folder": found.folder}
        await self._state.sessions.add_sampler(row)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def join_sampler(self, http: Request, tenant: Tenant) -> Response:
        sampler = body.SampleAddress.of(await read_body(http)).sampling_session_id
        number = await self._state.sessions.join(tenant.name, sampler or "")
        return JSONResponse({"type": "join_sampling_session", "client_counter": number})

    async def sampler(self, http: Request, tenant: Tenant) -> Response:
        row = await self._state.sessions.sampler(tenant.name, http.path_params["sampler"])
        return JSONResponse({"sampler_id": row.id, "base_model": row.base_model, "model_path": row.path})

    async def asample(self, http: Request, tenant: Tenant) -> Response:
        data = await read_body(http, most_of_sample((await self._state.about()).max_context_length))
        given = body.SampleAddress.of(data)
        if given.sampling_session_id is None or given.seq_id is None:
            raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
        await self._state.sessions.source(tenant.name, given.sampling_session_id)
        sampler = given.sampling_session_id
        operation = Operation(f"{sampler}:{given.seq_id}", tenant.name, SAMPLE, sampler, data)
        ids = [f"{operation.id}:{i}" for i in range(min(given.num_samples, MOST_SAMPLES))]
        return await self._accepted(operation, tenant, sample_sequence_ids=ids)

    # --- futures -----------------------------------------------------------------------------------------------------

    async def retrieve_future(self, http: Request, tenant: Tenant) -> Response:
        request_id = body.RequestBody.of(await read_body(http)).request_id
        outcome = await self._state.futures.retrieve(tenant.name, request_id)
        if outcome is None:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        if outcome.error is not None:
            return JSONResponse({"error": outcome.error, "category": outcome.category})
        return Response(outcome.data, media_type=outcome.content_type)

    async def cancel_future(self, http: Request, tenant: Tenant) -> Response:
        await self._state.futures.cancel(tenant.name, body.RequestBody.of(await read_body(http)).request_id)
        return Response(status_code=204)

    async def _accepted(self, operation: Operation, tenant: Tenant, *, also: Any = None, **more: Any) -> Response:
        await self._state.accept(operation, also, tenant)
        return _future(operation, **more)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    async def training_runs(self, http: Request, tenant: Tenant) -> Response:
        project = http.query_params.get("project_id")
        return JSONResponse(await self._state.sessions.runs(tenant.name, *_page(http, 20), project))

    async def training_run(self, http: Request, tenant: Tenant) -> Response:
        return JSONResponse(await self._state.sessions.run(tenant.name, http.path_params["run"]))

    async def run_checkpoints(self, http: Request, tenant: Tenant) -> Response:
        run = http.path_params["run"]
        await self._state.sessions.model(tenant.name, run)
        rows, _ = await self._state.checkpoints.listed(tenant.name, run, None, 0)
        return JSONResponse({"checkpoints": [as_json(row) for row in rows]})

    async def checkpoints(self, http: Request, tenant: Tenant) -> Response:
        limit, offset = _page(http, 100)
        rows, total = await self._state.checkpoints.listed(tenant.name, None, limit, offset)
        cursor = {"offset": offset, "limit": limit, "total_count": total}
        return JSONResponse({"checkpoints": [as_json(row) for row in rows], "cursor": cursor})

    async def delete_checkpoint(self, http: Request, tenant: Tenant) -> Response:
        await self._state.checkpoints.remove(tenant.name, _path(http))
        return Response(status_code=204)

    async def publish(self, http: Request, tenant: Tenant) -> Response:
        await self._state.checkpoints.change(tenant.name, _path(http), public=http.method == "POST")
        return Response(status_code=204)

    async def set_ttl(self, http: Request, tenant: Tenant) -> Response:
        ttl = body.Ttl.of(await read_body(http)).ttl_seconds
        expires = None if ttl is None else time.time() + ttl
        await self._state.checkpoints.change(tenant.name, _path(http), expires=expires)
        return Response(status_code=204)

    async def weights_info(self, http: Request, tenant: Tenant) -> Response:
        row = await self._state.checkpoints.find(tenant.name, body.CheckpointPath.of(await read_body(http)).tinker_path)
        lora = row.lora
        flags = {name: lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse({"base_model": row.base_model, "is_lora": True, "lora_rank": lora.get("rank"), **flags})


def _on_model(kind: str, tenant: Tenant, model: str, seq_id: int | None, data: bytes) -> Operation:
    """Return an operation. Without a sequence number, a repeated request is not recognised."""
    return Operation(f"{model}:{uuid.uuid4().hex if seq_id is None else seq_id}", tenant.name, kind, model, data)


def _future(operation: Operation, **more: Any) -> Response:
    known = {"request_id": operation.id} | ({} if operation.kind == SAMPLE else {"model_id": operation.scope})
    return Response(orjson.dumps(known | more), media_type=JSON_TYPE)


def _path(http: Request) -> TinkerPath:
    given = http.path_params
    return TinkerPath.of(f"tinker://{given['run']}/{given['kind']}/{given['name']}")


def _page(http: Request, limit: int) -> tuple[int, int]:
    try:
        limit, offset = int(http.query_params.get("limit", limit)), int(http.query_params.get("offset", 0))
    except ValueError:
        raise UserError(f"limit and offset are whole numbers, got {dict(http.query_params)}") from None
    if not 0 < limit <= MOST_PAGE or not 0 <= offset < 1 << 63:
        raise UserError(f"limit is from 1 to {MOST_PAGE} and offset from 0 to 2^63 - 1, got {limit} and {offset}")
    return limit, offset


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
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"


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
