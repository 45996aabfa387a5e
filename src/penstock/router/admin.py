"""The router's own endpoints, which show and change the dispatcher's state."""

from __future__ import annotations

import os
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import ConfigError, StateError, UserError
from penstock.guard import DATA_PATHS as ENGINE_PATHS
from penstock.rooms import plugged_in
from penstock.router.client_connection import Call, ClientConnection
from penstock.router.dispatcher import Dispatcher
from penstock.router.http import RefusalError, RequestHead, response
from penstock.router.membership import EngineEntry, Membership

DATA_PATHS = frozenset(path.encode() for path in ENGINE_PATHS) - {b"/metrics", b"/v1/realtime"}
"""Paths that any engine answers alike and without state for a later call, in vLLM 0.26 to 0.32. A test reads every
route of the installed vLLM and fails for a route that is on no list."""
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Text = Annotated[str, Field(min_length=1, max_length=512)]


class Strict(BaseModel):
    """A body with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


M = TypeVar("M", bound=Strict)


class _Policy(Strict):
    policy: Text | None = None
    prefix_length: int | None = None
    overload_threshold: float | None = None


class _EnginesBody(Strict):
    epoch: int = Field(ge=0)
    engines: list[EngineEntry]
    cut: list[str] = []
    closed: bool = False
    policy: _Policy = _Policy()


_MAX_BODY = 4 << 20


class AdminCall(Call):
    """One request to the router itself."""

    def __init__(
        self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher, control_ports: tuple[int, ...]
    ) -> None:
        self._client = client
        self._request = request
        self._dispatcher = dispatcher
        self._control_ports = control_ports
        self._body = bytearray()

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        self._body += piece
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done:
            self._answer()

    def refuse(self, refusal: RefusalError) -> None:
        self._dispatcher.metrics.rejected[refusal.code] += 1
        self._client.answer_refusal(refusal)

    def _answer(self) -> None:
        request, close = self._request, not self._request.keep_alive
        head_only = request.method == b"HEAD"
        method, path = "GET" if head_only else request.method.decode(), request.target.partition(b"?")[0].decode()
        if method == "GET" and path in {"/metrics", "/router/metrics"}:
            content, kind = plugged_in("figures")(self._dispatcher).encode(), _PROMETHEUS
        else:
            content, kind = orjson.dumps(self._execute(method, path, bytes(self._body))), "application/json"
        self._client.answer(response(200, content, content_type=kind, close=close, head_only=head_only), close=close)

    def _execute(self, method: str, path: str, body: bytes) -> Any:
        """Run one admin call; it is in force when this returns.

        Raises:
            RefusalError: 400 for a wrong body, 404 for an unknown path, 405 for a method that the path does not take,
                409 for an old epoch.
        """
        dispatcher = self._dispatcher
        match method, path:
            case "GET", "/router/health":
                return {"status": "ok", "pid": os.getpid(), "control_ports": self._control_ports}
            case "PUT", "/router/engines":
                return _announce(dispatcher, parse(_EnginesBody, body))
            case _:
                return plugged_in("router.other_calls")(dispatcher, method, path, body)


def _announce(dispatcher: Dispatcher, body: _EnginesBody) -> dict[str, Any]:
    try:
        policy = body.policy.model_dump(exclude_none=True)
        dispatcher.announce(Membership(body.epoch, tuple(body.engines), body.closed, policy, tuple(body.cut)))
    except ConfigError as error:
        raise RefusalError(400, "bad_policy", str(error)) from error
    except UserError as error:
        raise RefusalError(400, "bad_engines", str(error)) from error
    except StateError as error:
        raise RefusalError(409, "old_epoch", str(error)) from error
    return {"epoch": dispatcher.membership.epoch, "engines": len(dispatcher.backends)}


def parse(model: type[M], body: bytes) -> M:
    """Read a body. RefusalError: 400, it does not fit."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise RefusalError(400, "bad_json", f"the body does not fit: {what}") from None
