"""The router's own endpoints under `/router/`: small JSON bodies, validated, with clear answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import StateError, UserError
from penstock.router.head import RequestHead
from penstock.router.membership import EngineEntry
from penstock.router.refusal import RefusalError, response

if TYPE_CHECKING:
    from penstock.router.client_connection import ClientConnection
    from penstock.router.dispatcher import Dispatcher

_MAX_BODY = 4 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


M = TypeVar("M", bound=_Strict)


class _EngineBody(_Strict):
    name: str
    url: str
    weight_version: int = 0
    eligible: bool = True


class _EnginesBody(_Strict):
    epoch: int = Field(ge=0)
    engines: list[_EngineBody]


class _GateBody(_Strict):
    closed: bool


class AdminCall:
    """One admin request: collects its body, then answers at once."""

    def __init__(self, client: ClientConnection, request: RequestHead, dispatcher: Dispatcher) -> None:
        self._client = client
        self._request = request
        self._dispatcher = dispatcher
        self._body = b""
        self._done = False
        self._started = False

    def add_body(self, piece: bytes | memoryview, *, done: bool) -> None:
        """See `Call`."""
        self._body += piece
        self._done = done
        if len(self._body) > _MAX_BODY:
            raise RefusalError(413, "body_too_large", f"an admin body is at most {_MAX_BODY} bytes")
        if done and self._started:
            self._answer()

    def start(self) -> None:
        """See `Call`."""
        self._started = True
        if self._request.length < 0:
            raise RefusalError(411, "length_required", "send an admin body with Content-Length")
        if self._done:
            self._answer()

    def refuse(self, refusal: RefusalError) -> None:
        """See `Call`."""
        self._dispatcher.metrics.errors[refusal.code] += 1
        self._client.answer_refusal(refusal)

    def cancel(self) -> None:
        """Nothing is under way."""

    def pause(self, *, paused: bool) -> None:
        """Answers are small."""

    def _answer(self) -> None:
        try:
            content, content_type = self._result()
        except RefusalError as refusal:
            self.refuse(refusal)
            return
        close = not self._request.keep_alive
        head_only = self._request.method == b"HEAD"
        self._client.answer(
            response(200, content, content_type=content_type, close=close, head_only=head_only), close=close
        )

    def _result(self) -> tuple[bytes, str]:
        method = "GET" if self._request.method == b"HEAD" else self._request.method.decode()
        path = self._request.target.partition(b"?")[0].decode()
        match (method, path):
            case ("GET", "/router/health"):
                answer: dict[str, Any] = {"status": "ok"}
            case ("GET", "/router/engines"):
                answer = self._state()
            case ("PUT", "/router/engines"):
                answer = self._set_engines()
            case ("POST", "/router/gate"):
                closed = _parse(_GateBody, self._body).closed
                self._dispatcher.gate.set(closed=closed)
                answer = {"closed": closed}
            case ("GET", "/router/metrics"):
                return self._metrics().encode(), "text/plain; version=0.0.4; charset=utf-8"
            case (_, "/router/health" | "/router/engines" | "/router/gate" | "/router/metrics"):
                raise RefusalError(405, "method_not_allowed", f"{method} does not go with {path}")
            case _:
                raise RefusalError(404, "not_found", f"no such endpoint: {path[:200]}")
        return orjson.dumps(answer), "application/json"

    def _set_engines(self) -> dict[str, Any]:
        body = _parse(_EnginesBody, self._body)
        try:
            entries = [EngineEntry(e.name, e.url, e.weight_version, e.eligible) for e in body.engines]
            self._dispatcher.set_engines(body.epoch, entries)
        except UserError as error:
            raise RefusalError(400, "bad_engines", str(error)) from error
        except StateError as error:
            raise RefusalError(409, "old_epoch", str(error)) from error
        return {"epoch": self._dispatcher.membership.epoch, "engines": len(entries)}

    def _state(self) -> dict[str, Any]:
        dispatcher = self._dispatcher
        return {
            "epoch": dispatcher.membership.epoch,
            "gate_closed": dispatcher.gate.closed,
            "held": len(dispatcher.gate),
            "sessions": len(dispatcher.sessions),
            "requests": dispatcher.metrics.requests,
            "engines": [
                {
                    "name": e.name,
                    "url": e.entry.url,
                    "weight_version": e.entry.weight_version,
                    "eligible": e.entry.eligible,
                    "down": e.down,
                    "outstanding": e.outstanding,
                    "requests": e.requests,
                }
                for e in dispatcher.engines.values()
            ],
        }

    def _metrics(self) -> str:
        dispatcher = self._dispatcher
        return dispatcher.metrics.text(
            dispatcher.engines.values(),
            held=len(dispatcher.gate),
            sessions=len(dispatcher.sessions),
            gate_closed=dispatcher.gate.closed,
        )


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RefusalError(400, "bad_json", f"the body is not JSON: {error}") from None
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise RefusalError(400, "bad_json", f"the body does not fit: {what}") from None
