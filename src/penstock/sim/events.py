"""Server-sent events as vLLM sends them, with the faults that break a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from penstock.errors import EngineDeadError
from penstock.sim.answers import error_body
from penstock.sim.engine import SimEngine
from penstock.sim.faults import Fault, FaultKind, Phase
from penstock.sim.sequence import Delta, SimRequest, merged_deltas


class CutError(Exception):
    """The connection is to break here."""


async def deltas_of(engine: SimEngine, requests: Sequence[SimRequest]) -> AsyncIterator[tuple[int, Delta]]:
    """`merged_deltas`, until a fault of streams breaks it.

    Raises:
        EngineDeadError: the engine died, or a fault says to send an error event.
        CutError: a fault says to break the connection.
    """
    fault = engine.faults.take(Phase.REQUEST, FaultKind.CUT, FaultKind.ERROR_EVENT)
    if fault is not None and fault.after_tokens == 0:
        raise _break_of(fault)
    made = 0
    async for i, delta in merged_deltas(requests):
        yield i, delta
        made += delta.end - delta.start
        if fault is not None and made >= fault.after_tokens:
            raise _break_of(fault)


def _break_of(fault: Fault) -> Exception:
    return CutError() if fault.kind is FaultKind.CUT else EngineDeadError("a fault ends this stream")


class Commentator(Protocol):
    """Tells of the samples in comments of the stream (`telling.Teller`)."""

    def news(self) -> list[dict[str, Any]]: ...  # noqa: D102
    def spans(self) -> list[list[list[int]]]: ...  # noqa: D102


async def send_events(
    http: web.Request, chunks: AsyncIterator[Mapping[str, Any]], commentator: Commentator | None, *, progress: bool
) -> web.StreamResponse:
    """Answer with a stream of events and `[DONE]`. A dead engine gives an error event and `[DONE]`, as in vLLM.

    In comments, as our plugin in vLLM: the spans at the end, and where `progress` is asked for, what the samples have.
    Plain vLLM has no `commentator`, and makes none.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if progress and commentator is not None:
        response.headers["X-Penstock-Progress"] = "stream"
    await response.prepare(http)
    try:
        async for chunk in chunks:
            told = _comment({"samples": news}) if progress and commentator and (news := commentator.news()) else b""
            await response.write(told + b"data: " + orjson.dumps(chunk) + b"\n\n")
    except EngineDeadError as error:
        await response.write(b"data: " + orjson.dumps(error_body(str(error), "InternalServerError", 500)) + b"\n\n")
    except CutError:
        break_connection(http)
        return response
    last = _comment({"versions": commentator.spans()}) if commentator is not None else b""
    await response.write(last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _comment(content: Mapping[str, Any]) -> bytes:
    return b": penstock " + orjson.dumps(content) + b"\n\n"


def break_connection(http: web.Request) -> None:
    """Drop the connection without an end."""
    if http.transport is not None:
        http.transport.abort()
