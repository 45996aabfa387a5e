"""The router's own endpoints: small JSON bodies, validated, done at once, answered clearly."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import ConfigError, StateError, UserError
from penstock.router.hints import Hints
from penstock.router.membership import EngineEntry, Membership
from penstock.router.paths import DATA_PATHS
from penstock.router.prometheus import render
from penstock.router.refusal import RefusalError
from penstock.router.report import families, policy_in_force, state

if TYPE_CHECKING:
    from penstock.router.dispatcher import Dispatcher

Answer = tuple[bytes, str]
"""Content and its type."""

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of figures as text."""
_METHODS = {
    "/": "GET",
    "/router/health": "GET",
    "/router/engines": "GET or PUT",
    "/router/gate": "POST",
    "/router/policy": "PUT",
    "/router/choose": "POST",
    "/router/sessions/finish": "POST",
    "/router/metrics": "GET",
    "/metrics": "GET",
}
_SERVED = {
    "service": "penstock router",
    "data": sorted(path.decode() for path in DATA_PATHS),
    "router": sorted(path for path in _METHODS if path != "/"),
}
"""What `GET /` answers; paths of the configuration are served besides."""
Text = Annotated[str, Field(min_length=1, max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


M = TypeVar("M", bound=_Strict)


class _EngineBody(_Strict):
    name: str
    url: str
    weight_version: int = 0
    eligible: bool = True
    draining: bool = False
    adapters: list[str] | None = None
    dp_rank: int | None = None
    max_model_len: int | None = None
    api_key: str | None = None

    def entry(self) -> EngineEntry:
        given: dict[str, Any] = self.model_dump()
        given["adapters"] = None if self.adapters is None else tuple(self.adapters)
        return EngineEntry(**given)


class _EnginesBody(_Strict):
    epoch: int = Field(ge=0)
    engines: list[_EngineBody]
    cut: list[str] = []


class _GateBody(_Strict):
    closed: bool
    adapter: Text | None = None
    engine: Text | None = None


class _PolicyBody(_Strict):
    policy: Text
    prefix_length: int | None = Field(default=None, ge=1)
    overload_threshold: float | None = Field(default=None, ge=1)


class _ChoiceBody(_Strict):
    prompt_tokens: int = Field(default=0, ge=0)
    prefix_hashes: Text | None = None


class _SessionBody(_Strict):
    session_id: Text


def execute(dispatcher: Dispatcher, method: str, path: str, body: bytes) -> Answer:  # noqa: C901 - a table
    """Do one admin call on this process; it is in force when this returns.

    Raises:
        RefusalError: 400 for a body that does not fit, 404 for an unknown path, 405 for a method that does
            not go with the path, 409 for an old epoch.
    """
    match (method, path):
        case ("GET", "/"):
            answer: dict[str, Any] = _SERVED
        case ("GET", "/router/health"):
            port = dispatcher.shared_port
            ports = () if port is None else port.control_ports
            answer = {"status": "ok", "pid": os.getpid(), "control_ports": ports}
        case ("GET", "/router/engines"):
            answer = state(dispatcher)
        case ("PUT", "/router/engines"):
            answer = _set_engines(dispatcher, _parse(_EnginesBody, body))
        case ("POST", "/router/gate"):
            answer = _set_gate(dispatcher, _parse(_GateBody, body))
        case ("PUT", "/router/policy"):
            answer = _set_policy(dispatcher, _parse(_PolicyBody, body))
        case ("POST", "/router/choose"):
            asked = _parse(_ChoiceBody, body)
            hashes = None if asked.prefix_hashes is None else asked.prefix_hashes.encode()
            hints = Hints(prompt_tokens=asked.prompt_tokens, prefix_hashes=hashes)
            answer = {"engine": dispatcher.placement.choose(hints, time.monotonic())}
        case ("POST", "/router/sessions/finish"):
            answer = {"finished": dispatcher.finish_session(finished_session(body))}
        case ("GET", "/router/metrics" | "/metrics"):
            return render(families(dispatcher)).encode(), PROMETHEUS
        case _ if path in _METHODS:
            raise RefusalError(
                405, "method_not_allowed", f"{method} does not go with {path}, which takes {_METHODS[path]}"
            )
        case _:
            raise RefusalError(404, "not_found", f"no such endpoint: {path[:200]}")
    return orjson.dumps(answer), JSON


def finished_session(body: bytes) -> str:
    """Session that a body of `POST /router/sessions/finish` names; RefusalError: 400, for one that does not fit."""
    return _parse(_SessionBody, body).session_id


def _set_engines(dispatcher: Dispatcher, body: _EnginesBody) -> dict[str, Any]:
    membership = _replaced(dispatcher.membership, body)
    dispatcher.set_engines(membership.epoch, membership.engines, body.cut)
    return {"epoch": membership.epoch, "engines": len(membership.engines)}


def _replaced(present: Membership, body: _EnginesBody) -> Membership:
    try:
        return present.replaced_by(body.epoch, [engine.entry() for engine in body.engines])
    except UserError as error:
        raise RefusalError(400, "bad_engines", str(error)) from error
    except StateError as error:
        raise RefusalError(409, "old_epoch", str(error)) from error


def _set_gate(dispatcher: Dispatcher, body: _GateBody) -> dict[str, Any]:
    if body.adapter is not None and body.engine is not None:
        raise RefusalError(400, "bad_gate", "name an adapter or an engine, not both; neither is the gate for all")
    if body.closed and body.engine is not None and body.engine not in dispatcher.engines:
        known = ", ".join(dispatcher.engines) or "none"
        raise RefusalError(400, "bad_gate", f"no engine {body.engine!r} in the set; known: {known}")
    dispatcher.set_gate(closed=body.closed, adapter=body.adapter, engine=body.engine)
    return body.model_dump(exclude_none=True)


def _set_policy(dispatcher: Dispatcher, body: _PolicyBody) -> dict[str, Any]:
    names = tuple(name.strip() for name in body.policy.split(","))
    try:
        dispatcher.set_policy(names, body.model_dump(exclude={"policy"}, exclude_none=True))
    except ConfigError as error:
        raise RefusalError(400, "bad_policy", str(error)) from error
    return policy_in_force(dispatcher)


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "bad_json", f"the body is not JSON: {error}") from None
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise RefusalError(400, "bad_json", f"the body does not fit: {what}") from None
