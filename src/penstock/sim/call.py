"""One HTTP call in vLLM's forms: what it asks, the errors it may get, and the answer with our plugin's additions.

A handler takes a `Call` and returns JSON data, an aiohttp response, or a `Generation`, whose progress the plugin's own
code reports.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, cast
from uuid import uuid4

import orjson
from aiohttp import web

from penstock.engine.partial import Partial
from penstock.errors import EngineDeadError, RequestError
from penstock.plugin.progress import RequestProgress, serve
from penstock.sim.config import Fault, FaultKind, Phase
from penstock.sim.engine import SimEngine
from penstock.sim.scheduler import Delta, SimRequest, SimSequence
from penstock.sim.tokens import character_of
from penstock.sim.update import NotFoundError
from penstock.types import SamplingParams
from penstock.wire import PROGRESS_HEADER, RESUME_ARG, SampleReport, check_part, parts_of, spans_of, version_of_tokens

E = TypeVar("E", bound=StrEnum)

_TYPES = {str: "string", dict: "dictionary", list: "list"}


class InvalidFieldError(RequestError):
    """A field of the body or the query is missing or of the wrong form; FastAPI finds these in vLLM."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"1 validation error:\n  {field}: {message}")
        self.field = field


class CutError(Exception):
    """The connection is to break here."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the rank that it is for, and its body, empty where it has none."""

    http: web.Request
    engine: SimEngine
    ranks: Sequence[SimEngine]
    body: Mapping[str, Any]

    def field(self, name: str, kind: type) -> Any:
        """A field of the body. Raises InvalidFieldError where it is missing or of another type."""
        value = self.body.get(name)
        if not isinstance(value, kind):
            raise InvalidFieldError(name, f"Input should be a valid {_TYPES[kind]}, got {value!r}")
        return value

    def choice(self, name: str, default: E) -> E:
        text = self.http.query.get(name, default)
        try:
            return type(default)(text)
        except ValueError:
            known = ", ".join(type(default))
            raise InvalidFieldError(f"query.{name}", f"must be one of {known}, got {text!r}") from None

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.http.query.get(name, str(default)).lower()
        if text not in ("true", "false", "1", "0"):
            raise InvalidFieldError(f"query.{name}", f"Input should be a valid boolean, got {text!r}")
        return text in ("true", "1")

    def model(self) -> tuple[str, str | None]:
        """Name to answer with, and the LoRA's name where the model is one.

        Raises:
            NotFoundError: neither the served model nor a loaded adapter.
        """
        served, model = self.engine.config.served_model_name, self.body.get("model")
        if not model or model == served:
            return served, None
        name = self.field("model", str)
        if name not in self.engine.adapters.loaded:
            raise NotFoundError(f"The model `{model}` does not exist. Valid aliases: {served}.", "model")
        return name, name


def json_answer(data: Any, status: int = 200) -> web.Response:
    """JSON, as vLLM's JSONResponse."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def error_answer(message: str, kind: str, status: int, param: str | None = None) -> web.Response:
    """The `ErrorResponse` of vLLM with its status."""
    return json_answer(_error(message, kind, status, param), status)


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Make the UsageInfo of vLLM."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _error(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Generation(ABC):
    """A call that generates: its requests, and the form of their answer.

    `kind` begins the request's id; output that is `constrained` by a grammar cannot be resumed.

    Raises:
        NotFoundError: the model is neither the served one nor a loaded adapter.
        RequestError: a grammar, without `SimConfig.ignore_grammars`.
    """

    def __init__(self, call: Call, kind: str, *, constrained: bool) -> None:
        if constrained and not call.engine.config.ignore_grammars:
            raise RequestError(
                "the simulated engine has no grammars: leave out structured_outputs, response_format and a tool_choice "
                "that forces a call, or start it with ignore_grammars, which makes any tokens"
            )
        self.call = call
        self.whole_only = constrained
        self.model, self._lora = call.model()
        named = call.http.headers.get("X-Request-Id") or call.body.get("request_id") or uuid4().hex
        self.request_id = f"{kind}-{named}"
        self.created = int(time.time())
        self.return_ids = bool(call.body.get("return_token_ids"))
        self.requests: list[SimRequest] = []
        self._made: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
        """What is made, each with its request's index in `requests`."""
        self.begun: set[int] = set()
        """Choices of which an event was sent."""
        self.written: dict[int, int] = {}
        """Characters sent of each choice."""

    @abstractmethod
    def answer(self, *, streamed: bool) -> Mapping[str, Any]:
        """The whole answer; `streamed`: lines have brought the tokens."""

    @abstractmethod
    def chunk(self, index: int, sequence: SimSequence, delta: Delta) -> dict[str, Any]:
        """The event for new tokens of choice `index`."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        return iter(())

    @abstractmethod
    def usage_chunk(self) -> dict[str, Any]:
        """The event with the usage, for clients that ask for it."""

    def usage(self) -> dict[str, Any]:
        made = sum(len(s.output) for request in self.requests for s in request.sequences)
        return usage_of(sum(len(request.prompt_ids) for request in self.requests), made)

    async def run(
        self, prompts: Mapping[str, Sequence[int]], params: SamplingParams, extra: Any, max_tokens: int | None
    ) -> web.StreamResponse:
        """Submit prompts, by request id, and answer; `extra` are vLLM's, with what another engine made."""
        engine = self.call.engine
        parts = parts_to_resume(extra, params, engine)
        given: dict[str, Any] = {"lora": self._lora, "max_tokens": max_tokens, "parts": parts}
        try:
            for i, (request_id, ids) in enumerate(prompts.items()):
                self.requests.append(
                    await engine.submit(
                        ids,
                        params,
                        lambda delta, i=i: self._made.put_nowait((i, delta)),
                        request_id=request_id,
                        **given,
                    )
                )
            return await self._serve()
        finally:
            for request in self.requests:
                engine.drop(request)

    async def _serve(self) -> web.StreamResponse:
        http = self.call.http
        answer = _Answer(http)
        wanted = http.headers.get(PROGRESS_HEADER, "")
        plain = self.call.engine.config.plain
        progress = _Progress(self, int(wanted) if wanted.isdigit() and not plain else None)

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await (self._stream(send) if self.call.body.get("stream") else self._whole(send, progress))

        try:
            if plain:
                await app(None, None, answer.send)
            else:
                await serve(app, {"path": http.path}, None, answer.send, progress, wanted.encode() or None)
        except CutError:
            answer.cut()
        return answer.response

    async def _whole(self, send: Any, progress: _Progress) -> None:
        status = 200
        try:
            async for _ in self._deltas():
                await progress.advance()
            data = self.answer(streamed=progress.streamed)
        except EngineDeadError as error:
            status, data = 500, _dead(error)
        body = orjson.dumps(data)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            for chunk in self.opening():
                await event(orjson.dumps(chunk))
            async for i, delta in self._deltas():
                request = self.requests[i]
                index = i * request.params.n + delta.index
                await event(orjson.dumps(self.chunk(index, request.sequences[delta.index], delta)))
            options: Any = self.call.body.get("stream_options")
            if isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage"):
                await event(orjson.dumps(self.usage_chunk()))
        except EngineDeadError as error:
            await event(orjson.dumps(_dead(error)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """New tokens of all requests as they are made, each with its request's index.

        Raises:
            EngineDeadError: the engine died before all had ended, or a fault sends an error event.
            CutError: a fault breaks the connection.
        """
        fault = self.call.engine.faults.take(Phase.REQUEST, FaultKind.CUT, FaultKind.ERROR_EVENT)
        if fault is not None and fault.after_tokens == 0:
            raise _break_of(fault)
        made, unfinished = 0, len(self.requests)
        while unfinished:
            i, delta = await self._made.get()
            if delta is None:
                unfinished -= 1
                if (death := self.requests[i].death) is not None:
                    raise EngineDeadError(death)
                continue
            yield i, delta
            made += delta.end - delta.start
            if fault is not None and made >= fault.after_tokens:
                raise _break_of(fault)


def _break_of(fault: Fault) -> Exception:
    return CutError() if fault.kind is FaultKind.CUT else EngineDeadError("a fault ends this stream")


def _dead(error: EngineDeadError) -> dict[str, Any]:
    return _error(str(error), "InternalServerError", 500)


class _Answer:
    """An ASGI answer that goes out by aiohttp."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.response: web.StreamResponse = web.Response()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Take a message of the application. Start and first body are one write, and so are last body and end.

        After the last line alone a client may leave, which a router takes for a cancelled request.
        """
        if message["type"] == "http.response.start":
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self.response = web.StreamResponse(status=message["status"], headers=headers)
            if headers["content-type"].startswith("text/event-stream"):
                await self.response.prepare(self._http)
            return
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await (self.response.write if message.get("more_body") else self.response.write_eof)(message["body"])

    def cut(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()


class _Progress(RequestProgress):
    """What the samples of one call have; `chunk`: tokens of one sample after which lines report, 0 for never."""

    def __init__(self, generation: Generation, chunk: int | None) -> None:
        super().__init__(streamed=chunk is not None)
        self._generation = generation
        self._chunk = chunk
        self._sequences = [s for request in generation.requests for s in request.sequences]
        # The client has what it sent along, and that a sample had ended.
        self._reported = [s.resumed_tokens for s in self._sequences]
        self._reported_end = [s.resumed_whole for s in self._sequences]

    async def advance(self) -> None:
        """There are new tokens: let a line be written where they are enough for it."""
        made = zip(self._sequences, self._reported, strict=True)
        if self._chunk and max(len(s.output) - reported for s, reported in made) >= self._chunk:
            self.moved.set()
            await asyncio.sleep(0)  # a connection that is cut now has had the line

    def take_updates(self) -> list[SampleReport]:
        """What is new, as `Partial.add` reads it."""
        updates: list[SampleReport] = []
        for i, sequence in enumerate(self._sequences):
            ended = sequence.finish_reason is not None
            if len(sequence.output) > self._reported[i] or ended > self._reported_end[i]:
                updates.append(self._report(i, sequence))
                self._reported[i], self._reported_end[i] = len(sequence.output), ended
        return updates

    def spans(self) -> list[list[list[Any]]]:
        """`[[version, start, end], ...]` of each sample."""
        return [_spans(s) for s in self._sequences]

    def _report(self, index: int, sequence: SimSequence) -> SampleReport:
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
            "whole_only": self._generation.whole_only,
        }


def _entries(pairs: Iterable[tuple[int, float]]) -> str:
    return orjson.dumps([[[token, logprob, 1, character_of(token)]] for token, logprob in pairs]).decode()


def _spans(sequence: SimSequence) -> list[list[Any]]:
    return [[version_of_tokens(label), *rest] for label, *rest in spans_of(sequence.versions)]


def parts_to_resume(extra: Any, params: SamplingParams, engine: SimEngine) -> list[Partial]:
    """Read what the samples of a request have already from its extra arguments; RequestError if it is malformed."""
    config = engine.config
    given: Any = cast("dict[str, Any]", extra).get(RESUME_ARG) if isinstance(extra, dict) else None
    parts = [] if given is None or config.plain else parts_of(given, params.n)
    for part in parts:
        check_part(part, room=config.max_model_len, vocab_size=config.vocab_size, logprobs=params.logprobs)
    return [Partial(**part) for part in parts]
