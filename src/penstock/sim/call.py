"""One HTTP call in vLLM's format: its fields, its possible errors, and the answer with our plugin's additions.

A handler takes a `Call` and returns JSON data, an aiohttp response, or a `Generation`. The plugin's own code reports
the progress of a `Generation`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from uuid import uuid4

import orjson
from aiohttp import web

from penstock.errors import EngineDeadError, RequestError
from penstock.plugin.progress import RequestProgress, SampleProgress, serve
from penstock.plugin.resume import check_part, parts_of
from penstock.sim.config import Fault, FaultKind, Phase
from penstock.sim.engine import SimEngine
from penstock.sim.scheduler import Delta, SimRequest, SimSequence
from penstock.sim.tokens import character_of
from penstock.sim.update import NotFoundError
from penstock.types import SamplingParams
from penstock.wire import INITIAL_VERSION, PROGRESS_HEADER, RESUME_ARG, version_of_tokens


class CutError(Exception):
    """A fault breaks the connection at this point."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, its data-parallel rank, and its body (empty if it has none)."""

    http: web.Request
    engine: SimEngine
    ranks: Sequence[SimEngine]
    body: Mapping[str, Any]

    def field(self, name: str, kind: type) -> Any:
        """Return a field of the body. RequestError: it is missing or of another type."""
        value = self.body.get(name)
        if not isinstance(value, kind):
            raise RequestError(f"{name}: Input should be a valid {kind.__name__}, got {value!r}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        return self.http.query.get(name, str(default)).lower() in ("true", "1")

    def model(self) -> tuple[str, str | None]:
        """Return the answer's model name, and the LoRA's name if the model is one.

        Raises:
            NotFoundError: the model is neither the served model nor a loaded adapter.
        """
        served, model = self.engine.config.served_model_name, self.body.get("model")
        if not model or model == served:
            return served, None
        name = self.field("model", str)
        if name not in self.engine.adapters.loaded:
            raise NotFoundError(f"The model `{model}` does not exist. Valid aliases: {served}.", "model")
        return name, name


def json_answer(data: Any, status: int = 200) -> web.Response:
    """Answer with JSON, like vLLM's JSONResponse."""
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json")


def error_answer(message: str, kind: str, status: int, param: str | None = None) -> web.Response:
    """Answer with vLLM's `ErrorResponse` and its status."""
    return json_answer(_error(message, kind, status, param), status)


def _error(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Generation(ABC):
    """A call that generates: its requests, and the format of their answer.

    `kind` is the first part of the request's id. `constrained` means that a grammar applies; such output cannot resume.

    Raises:
        NotFoundError: the model is neither the served model nor a loaded adapter.
        RequestError: the request has a grammar, and `SimConfig.ignore_grammars` is off.
    """

    whole_name = chunk_name = ""
    """The field `object` of an answer and of an event. Empty: the format has no such field."""
    unused: Sequence[str] = ()
    """Fields of vLLM's answers that the simulated engine leaves null."""

    def __init__(self, call: Call, kind: str, *, constrained: bool) -> None:
        if constrained and not call.engine.config.ignore_grammars:
            raise RequestError(
                "the simulated engine has no grammars: leave out structured_outputs, response_format and a tool_choice "
                "that forces a call, or start it with ignore_grammars, which makes any tokens"
            )
        self.call = call
        self.model, self._lora = call.model()
        named = call.http.headers.get("X-Request-Id") or call.body.get("request_id") or uuid4().hex
        self.request_id = f"{kind}-{named}"
        self.created = int(time.time())
        self.return_ids = bool(call.body.get("return_token_ids"))
        self.requests: list[SimRequest] = []
        wanted = call.http.headers.get(PROGRESS_HEADER, "")
        in_lines = wanted.isdecimal() and not call.engine.config.plain
        self.progress = RequestProgress(int(wanted) if in_lines else 0, streamed=in_lines)
        self._constrained = constrained
        self._made: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()
        """New tokens, each with the index of its choice; None at the end of a request."""

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """Return the fields common to an answer and every event."""

    @abstractmethod
    def choice(self, place: int, sequence: SimSequence, delta: Delta | None) -> dict[str, Any]:
        """Return a choice with new tokens for an event, or with all for an answer."""

    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""
        sequences = enumerate(s for request in self.requests for s in request.sequences)
        choices = [self.choice(place, s, None) for place, s in sequences]
        rest = dict.fromkeys(self.unused)
        return {**self._named(self.whole_name), "choices": choices, "usage": self.usage(), **rest}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._named(self.chunk_name), "choices": choices, **more}

    def chunk(self, place: int, delta: Delta) -> dict[str, Any]:
        """Return the event for new tokens of a choice."""
        choice = self.choice(place, delta.sequence, delta)
        return self.event([choice if delta.finished else {**choice, "finish_reason": None, "stop_reason": None}])

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the events that precede the first token."""
        return iter(())

    def usage(self) -> dict[str, Any]:
        made = sum(len(s.output) for request in self.requests for s in request.sequences)
        given = sum(len(request.prompt_ids) for request in self.requests)
        details = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made, **details}

    def _named(self, name: str) -> dict[str, Any]:
        return {**self.head(), "object": name} if name else self.head()

    async def run(
        self, prompts: Mapping[str, Sequence[int]], params: SamplingParams, extra: Any, max_tokens: int | None
    ) -> web.StreamResponse:
        """Submit prompts by request id, and answer. `extra`: vLLM's extra arguments, with tokens of another engine."""
        engine = self.call.engine
        parts = parts_to_resume(extra, params, engine)
        try:
            for number, (request_id, ids) in enumerate(prompts.items()):
                listener = partial(self._count, number * params.n, parts)
                request = await engine.submit(
                    ids, params, listener, request_id=request_id, lora=self._lora, max_tokens=max_tokens, parts=parts
                )
                self.requests.append(request)
            return await self._serve()
        finally:
            for request in self.requests:
                engine.drop(request)

    def _count(self, first: int, parts: Sequence[Mapping[str, Any]], delta: Delta | None) -> None:
        """Count tokens when they are made: the next may have another version."""
        if delta is None:
            self._made.put_nowait(None)
            return
        sequence, samples = delta.sequence, self.progress.samples
        place = first + sequence.index
        if (sample := samples.get(str(place))) is None:
            sample = samples[str(place)] = _SimProgress(sequence, place, whole_only=self._constrained)
            if sequence.index < len(parts):
                sample.begin(parts[sequence.index]["versions"])
        self.progress.asked |= sequence.request.asked
        label, _, *notes = sequence.versions[-1] if sequence.versions else (INITIAL_VERSION, 0)
        made_by = version_of_tokens(label), notes[0] if notes else None
        self.progress.count(sample, made_by, sequence.finish_reason, sequence.stop_reason)
        self._made.put_nowait((place, delta))

    async def _serve(self) -> web.StreamResponse:
        http = self.call.http
        answer = _Answer(http)

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await (self._stream(send) if self.call.body.get("stream") else self._whole(send))

        try:
            if self.call.engine.config.plain:
                await app(None, None, answer.send)
            else:
                wanted = http.headers.get(PROGRESS_HEADER, "").encode()
                await serve(app, {"path": http.path}, None, answer.send, self.progress, wanted or None)
        except CutError:
            answer.cut()
        return answer.response

    async def _whole(self, send: Any) -> None:
        status = 200
        try:
            async for _ in self._deltas():
                if self.progress.moved.is_set():
                    await asyncio.sleep(0)  # lets the progress line go out before a cut of the connection
            data = self.answer()
        except EngineDeadError as error:
            status, data = 500, _dead(error)
        body = orjson.dumps(data)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any) -> None:
        async def event(data: Mapping[str, Any]) -> None:
            body = b"data: " + orjson.dumps(data) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            for chunk in self.opening():
                await event(chunk)
            async for place, delta in self._deltas():
                await event(self.chunk(place, delta))
            options: Any = self.call.body.get("stream_options")
            if isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage"):
                await event(self.event([], usage=self.usage()))
        except EngineDeadError as error:
            await event(_dead(error))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield new tokens of all requests, each with the index of its choice.

        Raises:
            EngineDeadError: the engine died before all requests ended, or a fault sends an error event.
            CutError: a fault breaks the connection.
        """
        fault = self.call.engine.faults.take(Phase.REQUEST, FaultKind.CUT, FaultKind.ERROR_EVENT)
        if fault is not None and fault.after_tokens == 0:
            raise _break_of(fault)
        made, unfinished = 0, len(self.requests)
        while unfinished:
            if (item := await self._made.get()) is None:
                unfinished -= 1
                if (death := self.call.engine.death) is not None:
                    raise EngineDeadError(death)
                continue
            yield item
            made += item[1].end - item[1].start
            if fault is not None and made >= fault.after_tokens:
                raise _break_of(fault)


def _break_of(fault: Fault) -> Exception:
    return CutError() if fault.kind is FaultKind.CUT else EngineDeadError("a fault ends this stream")


def _dead(error: EngineDeadError) -> dict[str, Any]:
    return _error(str(error), "InternalServerError", 500)


class _Answer:
    """An ASGI answer that is sent by aiohttp."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.response: web.StreamResponse = web.Response()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Start and first body are one write, last body and end too.

        If the end came in a write of its own, a client could leave before it. A router would see a cancelled request.
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


class _SimProgress(SampleProgress):
    """The tokens of a sequence so far. The plugin's own code reports them."""

    def total(self) -> int:
        return len(self.state.output)

    def made(self, start: int, end: int) -> tuple[list[int], str | None]:
        sequence: SimSequence = self.state
        ids = sequence.output[start:end]
        if not sequence.request.params.logprobs or not ids:
            return ids, None
        pairs = zip(ids, sequence.logprobs[start:end], strict=True)
        return ids, orjson.dumps([[[token, logprob, 1, character_of(token)]] for token, logprob in pairs]).decode()


def parts_to_resume(extra: Any, params: SamplingParams, engine: SimEngine) -> list[dict[str, Any]]:
    """Read the samples' earlier tokens from `extra`, with one logprob per token.

    RequestError: the argument is malformed.
    """
    config = engine.config
    given: Any = cast("dict[str, Any]", extra).get(RESUME_ARG) if isinstance(extra, dict) else None
    parts = [] if given is None or config.plain else parts_of(given, params.n)
    check = partial(check_part, room=config.max_model_len, vocab_size=config.vocab_size, logprobs=params.logprobs)
    checked = [(check(part), part) for part in parts]
    return [{**part, "logprobs": [position[0][1] for position in positions]} for positions, part in checked]
