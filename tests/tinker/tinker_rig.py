"""A Tinker service over simulated engines and a small learner that speaks the learner's interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from patience import WAIT_S
from penstock import Fleet
from penstock.asgi import listening_at, serving_app
from penstock.router.server import Router
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.tinker.api import serving
from penstock.tinker.database import Database
from penstock.tinker.schema import PROTO_TYPE, pb
from penstock.tinker.service_state import About, Options
from penstock.tinker.tenants import Tenant, Tenants
from penstock.tinker.training import REFUSED

BASE = "sorter"
KEY, OTHER_KEY = "tml-key-of-alice", "tml-key-of-robert"
ADAPTER = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@dataclass
class FakeLearner:
    """Counts steps, and logprobs each token as -0.5; `done` are the operations that it ran, in order."""

    fleet: Fleet | None = None
    done: list[tuple[str, str]] = field(default_factory=list)
    models: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    last: dict[str, tuple[str, Response]] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    waiting: bool = False
    incarnation: int = 0
    value: float = 0.0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/operations/{request}", self.operation, methods=["POST"]),
                Route("/models", self.listed),
            ]
        )

    async def listed(self, _: Request) -> Response:
        models = {
            model: {"steps": steps, "saved": "a folder" if model in self.saved else None}
            for model, steps in self.models.items()
        }
        return JSONResponse({"incarnation": str(self.incarnation), "models": models})

    async def operation(self, http: Request) -> Response:
        request, kind, model = http.path_params["request"], http.headers["X-Operation"], http.headers["X-Model"]
        if http.headers["X-Incarnation"] != str(self.incarnation):
            return Response("another", 412)
        if self.last.get(model, ("", None))[0] == request:
            return self.last[model][1]
        body = await http.body()
        if self.hold is not None:
            self.waiting = True
            await self.hold.wait()
        self.done.append((kind, request))
        self.bodies[request] = body
        try:
            answer = await getattr(self, kind)(model, body)
        except ValueError as error:
            answer = JSONResponse({"error": str(error)}, REFUSED)
        self.last[model] = request, answer
        return answer

    async def create_model(self, model: str, _: bytes) -> Response:
        self.models[model] = 0
        return Response()

    async def forward_backward(self, _: str, body: bytes) -> Response:
        message = pb.ForwardBackwardRequest.FromString(body)
        if message.loss_fn not in {"cross_entropy", "importance_sampling"}:
            raise ValueError(f"loss {message.loss_fn!r} is not known")
        lengths = [sum(len(chunk.encoded_text.tokens) // 4 for chunk in d.model_input) for d in message.data]
        output = pb.ForwardBackwardOutput(loss_fn_output_type="TensorData")
        record = output.loss_fn_outputs.add(num_datums=len(lengths))
        record.fields["logprobs"].data = np.full(sum(lengths), -0.5, np.float32).tobytes()
        record.fields["logprobs"].offsets = np.cumsum([0, *(4 * n for n in lengths)]).astype(np.int64).tobytes()
        record.fields["logprobs"].dtype = pb.DTYPE_FLOAT32
        output.metrics["loss:sum"] = 0.5 * sum(lengths)
        return Response(output.SerializeToString(), media_type=PROTO_TYPE)

    forward = forward_backward

    async def optim_step(self, model: str, body: bytes) -> Response:
        self.models[model] += 1
        return JSONResponse({"metrics": {"grad_norm:mean": json.loads(body)["adam_params"]["learning_rate"]}})

    async def save_weights(self, model: str, body: bytes) -> Response:
        folder = Path(json.loads(body)["folder"])
        folder.mkdir(parents=True)
        (folder / "steps").write_text(str(self.models[model]))
        self.saved[model] = self.models[model]
        return JSONResponse({})

    async def load_weights(self, model: str, body: bytes) -> Response:
        self.models[model] = int((Path(json.loads(body)["folder"]) / "steps").read_text())
        return JSONResponse({})

    async def save_weights_for_sampler(self, _: str, body: bytes) -> Response:
        given = json.loads(body)
        self.value += 1.0
        folder = Path(given["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {TENSOR: np.full((2, 4), self.value, np.float32)}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, "peft_type": "LORA"}))
        if given["adapter_name"] is not None and self.fleet is not None:
            await self.fleet.update_adapter(given["adapter_name"], tensors.items(), config=ADAPTER)
        return JSONResponse({})

    async def drop_model(self, model: str, _: bytes) -> Response:
        self.models.pop(model, None)
        return JSONResponse({})


@dataclass
class Rig:
    """An API process, with two tenants, alice and robert, and a connection to its database."""

    data: Path
    learner: FakeLearner
    fleet: Fleet
    engines: list[SimServer]
    options: Options
    http: httpx.AsyncClient
    database: Any = None

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @asynccontextmanager
    async def process(self, **more: Any) -> AsyncIterator[Rig]:
        """Another API process on the same database."""
        options = replace(self.options, **more)
        async with serving(options) as url, httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            database = Database(options.database)
            yield replace(self, options=options, http=http, database=database)
            await database.close()

    @asynccontextmanager
    async def second(self, **more: Any) -> AsyncIterator[Rig]:
        """One that knows of engines and learner from the database alone."""
        async with self.process(name="second", learner=None, fleet=None, about=About("", ""), **more) as found:
            yield found

    async def call(
        self, method: str, path: str, body: Any = None, *, key: str = KEY, status: int = 200, **more: Any
    ) -> Any:
        """The answer's JSON, or None without one."""
        answer = await self.http.request(method, f"/api/v1/{path}", json=body, headers={"X-API-Key": key}, **more)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    get = partialmethod(call, "GET")
    post = partialmethod(call, "POST")
    put = partialmethod(call, "PUT")
    delete = partialmethod(call, "DELETE")

    async def session(self, key: str = KEY) -> str:
        return (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}, key=key))["session_id"]

    async def result(self, future: Any, *, key: str = KEY) -> Any:
        """The result of a future: JSON, or the bytes of a message."""
        for _ in range(200):
            answer = await self.http.post(
                "/api/v1/retrieve_future", json={"request_id": future["request_id"]}, headers={"X-API-Key": key}
            )
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == PROTO_TYPE:
                return answer.content
            found = answer.json()
            if found.get("type") != "try_again":
                return found
        raise AssertionError("no result")

    async def done(self, path: str, body: Any, *, key: str = KEY) -> Any:
        """The result of an operation."""
        return await self.result(await self.post(path, body, key=key), key=key)

    async def model(self, key: str = KEY, session: str | None = None, number: int = 0, **more: Any) -> str:
        session = session or await self.session(key)
        body = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 4}, **more}
        found = await self.done("create_model", body, key=key)
        assert found["model_id"] == f"{session}:train:{number}"
        return found["model_id"]

    async def sampler(self, session: str, number: int = 0, key: str = KEY, **more: Any) -> str:
        body = {"session_id": session, "sampling_session_seq_id": number, **(more or {"base_model": BASE})}
        return (await self.post("create_sampling_session", body, key=key))["sampling_session_id"]

    def sample_body(self, sampler: str, seq: int = 1, **more: Any) -> dict[str, Any]:
        return {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 8, "stop": []},
        } | more

    async def sample(self, sampler: str, seq: int = 1, **more: Any) -> Any:
        found = await self.result(await self.post("asample", self.sample_body(sampler, seq, **more)))
        return pb.SampleResponse.FromString(found) if isinstance(found, bytes) else found

    async def step(self, model: str, seq: int) -> Any:
        return await self.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}})


SHARED: list[tuple[Fleet, list[SimServer]]] = []


@asynccontextmanager
async def fleet_of(count: int = 1, **options: Any) -> AsyncIterator[tuple[Fleet, list[SimServer]]]:
    """A fleet of simulated engines and a router in this process, with a control socket."""
    async with AsyncExitStack() as stack:
        config = SimConfig(**{"tokens_per_second": 2000, "max_model_len": 512, "max_loras": 64, **options})
        servers = [await stack.enter_async_context(SimServer(config)) for _ in range(count)]
        router = Router()
        await router.start()
        stack.push_async_callback(router.close)
        fleet = Fleet.connect([server.url for server in servers], url=router.url, control_timeout_s=WAIT_S)
        yield await stack.enter_async_context(fleet), servers


@asynccontextmanager
async def learner_at(path: Path, learner: FakeLearner) -> AsyncIterator[None]:
    listener = listening_at(path, "the learner")
    async with serving_app(learner.app(), listener, "the learner"):
        yield


@asynccontextmanager
async def parts(data: Path, *, sim: dict[str, Any] | None = None, **more: Any) -> AsyncIterator[Rig]:
    """Engines and a learner, and what an API process over them would be; none runs."""
    async with AsyncExitStack() as stack:
        fleet, servers = SHARED[0] if sim is None else await stack.enter_async_context(fleet_of(**sim))
        learner = FakeLearner(fleet)
        path = data / "learner.sock"
        await stack.enter_async_context(learner_at(path, learner))
        usual: dict[str, Any] = {
            "data": data,
            "database": f"sqlite:///{data}/tinker.db",
            "tenants": Tenants([Tenant("alice", KEY), Tenant("robert", OTHER_KEY, max_queued=4)]),
            "learner": path,
            "fleet": fleet.url,
            "about": About(BASE, str(data), 512),
            "hold_s": 5.0,
        }
        options = Options(**usual | more)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=WAIT_S))
        yield Rig(data, learner, fleet, servers, options, http)


@asynccontextmanager
async def rig(data: Path, **more: Any) -> AsyncIterator[Rig]:
    async with parts(data, **more) as found, found.process() as service:
        yield service


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
