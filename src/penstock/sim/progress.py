"""Answers in one piece and as streams, with the faults that break them, as vLLM with Penstock's plugin sends them.

The plugin's additions: progress of the samples, their weight versions, and requests that another engine began.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson
from aiohttp import web

from penstock.engine.partial import Partial
from penstock.errors import EngineDeadError
from penstock.sim.config import SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.faults import Fault, FaultKind, Phase
from penstock.sim.http import error_body, json_answer
from penstock.sim.scheduler import Delta, SimRequest, SimSequence, merged_deltas
from penstock.sim.tokens import character_of
from penstock.types import SamplingParams
from penstock.wire import (
    GENERATE,
    LINES_TYPE,
    MAX_SPANS_HEADER,
    PROGRESS_HEADER,
    RESUME_ARG,
    SPANS_HEADER,
    STREAM_PROGRESS,
    SampleReport,
    check_part,
    comment,
    name_tokens,
    parts_of,
    spans_of,
    version_of_tokens,
)


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


async def send_events(
    http: web.Request, chunks: AsyncIterator[Mapping[str, Any]], reporter: ProgressReporter | None
) -> web.StreamResponse:
    """Answer with a stream of events and `[DONE]`. A dead engine gives an error event and `[DONE]`, as in vLLM.

    In comments, as our plugin in vLLM: the spans at the end, and where the client asks, what the samples have.
    Plain vLLM has no `reporter`, and makes none.
    """
    progress = http.headers.get(PROGRESS_HEADER) == STREAM_PROGRESS
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    if progress and reporter is not None:
        response.headers[PROGRESS_HEADER] = STREAM_PROGRESS
    await response.prepare(http)
    try:
        async for chunk in chunks:
            updates = reporter.take_updates() if progress and reporter else []
            note = comment({"samples": updates}) if updates else b""
            data = orjson.dumps(chunk)
            await response.write(note + b"data: " + (data if reporter is None else _named(http, data)) + b"\n\n")
    except EngineDeadError as error:
        await response.write(b"data: " + orjson.dumps(error_body(str(error), "InternalServerError", 500)) + b"\n\n")
    except CutError:
        break_connection(http)
        return response
    last = comment({"versions": reporter.spans()}) if reporter is not None else b""
    await response.write(last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def break_connection(http: web.Request) -> None:
    """Drop the connection without an end."""
    if http.transport is not None:
        http.transport.abort()


def parts_to_resume(extra: Any, params: SamplingParams, config: SimConfig) -> list[Partial]:
    """Read what the samples of a request have already from its extra arguments; RequestError if it is malformed."""
    given: Any = cast("dict[str, Any]", extra).get(RESUME_ARG) if isinstance(extra, dict) else None
    parts = [] if given is None or config.plain else parts_of(given, params.n)
    for part in parts:
        check_part(part, room=config.max_model_len, vocab_size=config.vocab_size, logprobs=params.logprobs)
    return [Partial(**part) for part in parts]


def _entries(pairs: Iterable[tuple[int, float]]) -> str:
    return orjson.dumps([[[token, logprob, 1, character_of(token)]] for token, logprob in pairs]).decode()


def _spans(sequence: SimSequence) -> Iterator[tuple[Any, ...]]:
    return ((version_of_tokens(label), *rest) for label, *rest in spans_of(sequence.versions))


class ProgressReporter:
    """Reports the progress of one HTTP request's samples, each part once."""

    def __init__(self, requests: Sequence[SimRequest], *, whole_only: bool = False) -> None:
        self._sequences = [s for request in requests for s in request.sequences]
        self._whole_only = whole_only
        # The client has what it sent along, and that a sample had ended.
        self._reported = [s.resumed_tokens for s in self._sequences]
        self._reported_end = [s.resumed_whole for s in self._sequences]

    @property
    def unreported(self) -> int:
        """Largest number of unreported tokens of one sample."""
        return max(len(s.output) - reported for s, reported in zip(self._sequences, self._reported, strict=True))

    def take_updates(self) -> list[SampleReport]:
        """What is new, as `Partial.add` reads it."""
        updates: list[SampleReport] = []
        for i, sequence in enumerate(self._sequences):
            ended = sequence.finish_reason is not None
            if len(sequence.output) > self._reported[i] or ended > self._reported_end[i]:
                updates.append(self._of(i, sequence))
                self._reported[i], self._reported_end[i] = len(sequence.output), ended
        return updates

    def spans(self) -> list[list[list[Any]]]:
        """`[[version, start, end], ...]` of each sample."""
        return [[list(span) for span in _spans(s)] for s in self._sequences]

    def header(self) -> dict[str, str]:
        """Spans as a header, where that is not too long for a client."""
        value = json.dumps(self.spans(), separators=(",", ":"))
        return {SPANS_HEADER: value} if len(value) < MAX_SPANS_HEADER else {}

    def _of(self, index: int, sequence: SimSequence) -> SampleReport:
        start, end = self._reported[index], len(sequence.output)
        spans = ((version, max(first, start), last, *notes) for version, first, last, *notes in _spans(sequence))
        pairs = zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True)
        return {
            "index": index,
            "ids": sequence.output[start:end],
            "logprobs": _entries(pairs) if sequence.request.params.logprobs and end > start else None,
            "versions": [[version, last - first, *notes] for version, first, last, *notes in spans if last > first],
            "finish": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "asked": sequence.request.asked,
            "whole_only": self._whole_only,
        }


def _named(http: web.Request, data: bytes) -> bytes:
    return name_tokens(data) if http.path == GENERATE else data


def in_lines(http: web.Request, engine: SimEngine) -> bool:
    """Whether the answer comes as lines of JSON that report progress."""
    return not engine.config.plain and http.headers.get(PROGRESS_HEADER, "").isdigit()


async def answer(
    http: web.Request,
    engine: SimEngine,
    requests: Sequence[SimRequest],
    reporter: ProgressReporter,
    whole: Callable[[], Mapping[str, Any]],
) -> web.StreamResponse:
    """Wait for the requests and answer with `whole()`, as lines that report progress if the client asks for them.

    Raises:
        EngineDeadError: the engine died before a line was sent.
        CutError: a fault breaks the connection.
    """
    if not in_lines(http, engine):
        async for _ in deltas_of(engine, requests):
            pass
        response = json_answer(whole())
        if not engine.config.plain:
            response.body = _named(http, cast("bytes", response.body))
            response.headers.update(reporter.header())
        return response
    response = web.StreamResponse(headers={"Content-Type": LINES_TYPE})
    chunk = int(http.headers[PROGRESS_HEADER])
    status, body = 200, cast("Mapping[str, Any]", {})
    try:
        async for _ in deltas_of(engine, requests):
            if chunk and reporter.unreported >= chunk:
                await _line(http, response, {"samples": reporter.take_updates()})
        body = whole()
    except EngineDeadError as error:
        if not response.prepared:
            raise
        status, body = 500, error_body(str(error), "InternalServerError", 500)
    except CutError:
        break_connection(http)
        return response
    last = {"status": status, "samples": reporter.take_updates(), "versions": reporter.spans(), "answer": body}
    await _line(http, response, last, end=True)
    return response


async def _line(
    http: web.Request, response: web.StreamResponse, content: Mapping[str, Any], *, end: bool = False
) -> None:
    if not response.prepared:
        await response.prepare(http)
    # The last line and the answer's end are one write, as in our plugin. After the line alone a client may leave, which
    # a router takes for a cancelled request.
    await (response.write_eof if end else response.write)(orjson.dumps(content) + b"\n")
