"""What every request in flight has made, and how it is reported: in vLLM's answer, and while it is made.

Added to vLLM's answers are the version of each token and, where a client asks, what each sample has so far:
- Without `PROGRESS_HEADER`, in one piece: the header `SPANS_HEADER`. As a stream: a comment before `[DONE]`, and
  before that the ends of choices of which vLLM says nothing.
- With a number in it, for an answer in one piece: lines of JSON, `{"samples": [...]}` whenever a sample has so many
  tokens more, and at last `{"status", "samples", "versions", "answer"}`, vLLM's own answer in it, of the token endpoint
  without the tokens, which the samples of these lines are.
- With `stream`, for a stream: the header `PROGRESS_HEADER`, and a comment with `{"samples": [...]}` before every event
  that has tokens.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import orjson

from penstock.wire import (
    LINES_TYPE,
    MAX_SPANS_HEADER,
    PROGRESS_HEADER,
    SPANS_HEADER,
    STREAM_PROGRESS,
    SampleReport,
    comment,
    spans_of,
)

STREAM_REPORTS = (PROGRESS_HEADER.lower().encode(), STREAM_PROGRESS.encode())
"""Header of a stream that has such comments, by which a client knows an engine with our plugin."""
DONE = b"data: [DONE]"
EVENT = b"data: {"
ABORTED = b'"finish_reason":"abort"'
EMPTY: dict[str, dict[str, Any]] = {"/v1/completions": {"text": ""}, "/v1/chat/completions": {"delta": {}}}
"""What a choice of a stream holds that has no text."""
OK = 200
FLOOR = -9999.0
"""Of logprobs, as vLLM's own answers have it."""
CURRENT: ContextVar[RequestProgress | None] = ContextVar("penstock_in_flight", default=None)
"""The HTTP request that this task serves."""


# --- What a request has made -----------------------------------------------------------------------------------------


class SampleProgress:
    """One sample in flight; `state` is vLLM's RequestState."""

    def __init__(self, state: Any, place: int, *, whole_only: bool) -> None:
        self.state = state
        self.place = place
        self.versions: list[list[int]] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._whole_only = whole_only
        self._counted = 0
        self._reported = 0
        self._finish_reported = False
        self._unreported: list[list[int]] = []

    @property
    def unreported(self) -> int:
        """Tokens not reported yet."""
        return self._counted - self._reported

    @property
    def has_updates(self) -> bool:
        """There is something to report."""
        return self.unreported > 0 or (self.finish is not None and not self._finish_reported)

    def begin(self, versions: list[list[int]]) -> None:
        """It was taken up with these tokens of another engine, which its reader has."""
        self.versions = [list(part) for part in versions]
        self._counted = self._reported = sum(tokens for _, tokens in versions)

    def count(self, version: int) -> None:
        """Its new tokens are of this version."""
        total = self.state.detokenizer.num_output_tokens()
        if total == self._counted:
            return
        for parts in (self.versions, self._unreported):
            if not parts or parts[-1][0] != version:
                parts.append([version, 0])
            parts[-1][1] += total - self._counted
        self._counted = total

    def take_updates(self, *, asked: bool) -> SampleReport:
        """What `engine.partial.Partial.add` reads, each part once."""
        start, self._reported = self._reported, self._counted
        versions, self._unreported = self._unreported, []
        self._finish_reported = self.finish is not None
        return {
            "index": self.place,
            "ids": list(self.state.detokenizer.output_token_ids[start : self._counted]),
            "logprobs": _entries(self.state.logprobs_processor.logprobs, start, self._counted),
            "versions": versions,
            "finish": self.finish,
            "stop_reason": self.stop_reason,
            "asked": asked,
            "whole_only": self._whole_only,
        }

    def spans(self) -> list[list[int]]:
        """`[version, start, end]`, which cover its tokens exactly."""
        return spans_of(self.versions)


class RequestProgress:
    """One HTTP request and its samples.

    Attributes:
        asked: a client asked for its abort.
        moved: set when a sample has a chunk to report; cleared by its reporter.
        streamed: its reader gets every token by `take_updates`, and needs none of them in the answer.
    """

    def __init__(self, chunk_tokens: int = 0, *, streamed: bool = False) -> None:
        self.asked = False
        self.moved = asyncio.Event()
        self.streamed = streamed
        self.samples: dict[str, SampleProgress] = {}
        """By vLLM's internal request id."""
        self.names: set[str] = set()
        """Of its prompts, by which others can abort them."""
        self.to_finish: dict[str, tuple[SampleProgress, dict[str, Any]]] = {}
        """Samples that had ended on another engine, and what they have."""
        self._chunk_tokens = chunk_tokens

    def add(self, request: Any, state: Any) -> SampleProgress:
        """Follow a sample from now on."""
        params = request.sampling_params
        samples = state.parent_req.n if state.parent_req is not None else 1
        external = state.parent_req.external_req_id if state.parent_req is not None else state.external_req_id
        # The engine's grammar, and the logprobs of prompt tokens, begin where the engine's own prompt ends or begins.
        whole_only = bool(
            getattr(params, "structured_outputs", None)
            or params.prompt_logprobs is not None
            or request.prompt_token_ids is None
        )
        made = SampleProgress(state, _prompt_number(external) * samples + state.request_index, whole_only=whole_only)
        self.samples[request.request_id] = made
        self.names.add(external)
        return made

    def note(self, made: SampleProgress, version: int, finish: Any, stop_reason: int | str | None) -> None:
        """A sample has new tokens, or has ended."""
        made.count(version)
        if finish is not None:
            made.finish, made.stop_reason = str(finish), stop_reason
        if self._chunk_tokens and made.unreported >= self._chunk_tokens:
            self.moved.set()

    def lighten(self, output: Any) -> Any:
        """Leave the tokens out of vLLM's RequestOutput where their reader has them.

        vLLM makes several objects of each, and JSON of those, at once: 10 ms of its event loop for 512 tokens. 0.26 has
        None for samples that it is yet to add; an exception here would end its output handler, and so every request.
        """
        if self.streamed and output is not None:
            for completion in filter(None, output.outputs):
                completion.token_ids = []
                completion.logprobs = None if completion.logprobs is None else []
        return output

    def take_updates(self) -> list[SampleReport]:
        """What each sample has that was not reported yet."""
        return [made.take_updates(asked=self.asked) for made in self.samples.values() if made.has_updates]

    def spans(self) -> list[list[list[int]]]:
        """For each sample, prompt by prompt; a sample without a token has no span."""
        by_place = {made.place: made.spans() for made in self.samples.values()}
        return [by_place.get(place, []) for place in range(1 + max(by_place, default=-1))]


def _entries(logprobs: Any, start: int, end: int) -> str | None:
    """As JSON, `[[token id, logprob, rank, text], ...]` of each token; NaN and what is lower are `FLOOR`."""
    if logprobs is None or start == end:
        return None
    entries = [
        [[token, max(FLOOR, entry.logprob), entry.rank, entry.decoded_token] for token, entry in position.items()]
        for position in logprobs[start:end]
    ]
    return orjson.dumps(entries).decode()


def _prompt_number(external_request_id: str) -> int:
    """Read the number of the prompt, in which vLLM's ids of completions end: `cmpl-NAME-3`."""
    number = external_request_id.rpartition("-")[2]
    return int(number) if external_request_id.startswith("cmpl-") and number.isdecimal() else 0


# --- How it is reported ----------------------------------------------------------------------------------------------


async def serve(app: Any, scope: Any, receive: Any, send: Any, request: RequestProgress, wanted: bytes | None) -> None:
    """Let `app` answer, and add what `wanted` (the value of `PROGRESS_HEADER`) says."""
    if wanted is not None and wanted.isdigit():
        await _LineReporter(send, request).serve(app, scope, receive)
    else:
        await app(
            scope, receive, _with_spans(send, request, scope["path"], progress=wanted == STREAM_PROGRESS.encode())
        )


def _with_spans(send: Any, request: RequestProgress, path: str, *, progress: bool) -> Any:
    streams = False
    aborts = _Aborts(request, path)

    async def send_more(message: dict[str, Any]) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            streams = any(
                k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in message["headers"]
            )
            spans = b"" if streams else orjson.dumps(request.spans())
            if streams and progress:
                message = {**message, "headers": [*message["headers"], STREAM_REPORTS]}
            if len(spans) > len(b"[]") and len(spans) < MAX_SPANS_HEADER:
                message = {**message, "headers": [*message["headers"], (SPANS_HEADER.lower().encode(), spans)]}
        elif streams and (body := message.get("body")):
            aborts.read(body)
            if progress and (updates := request.take_updates()):
                body = comment({"samples": updates}) + body
            place = body.rfind(DONE)
            if place >= 0:
                last = aborts.missing_ends() + comment({"versions": request.spans()})
                body = body[:place] + last + body[place:]
            message = {**message, "body": body}
        await send(message)

    return send_more


class _Aborts:
    """Ends that vLLM's streams leave out.

    It sends no event without a token before a choice's first one, so one that is aborted while it waits would end
    without a finish reason, as if it were whole. Needed until vLLM sends those events; 0.26 and 0.32 do not.
    """

    def __init__(self, request: RequestProgress, path: str) -> None:
        self._request = request
        self._path = path
        self._first = b""
        self._ended: set[int] = set()

    def read(self, body: bytes) -> None:
        """Note what a part of the stream says, which is one event of vLLM's."""
        if not body.startswith(EVENT):
            return
        self._first = self._first or body
        if ABORTED in body:
            choices = _event(body).get("choices", ())
            self._ended.update(choice["index"] for choice in choices if choice.get("finish_reason") == "abort")

    def missing_ends(self) -> bytes:
        """An event for each choice that was aborted and whose reader has no end of it."""
        samples = self._request.samples.values() if self._path in EMPTY else ()
        places = sorted({made.place for made in samples if made.finish == "abort"} - self._ended)
        first = _event(self._first) if places and self._first else {}
        if "error" in first:
            return b""
        head = {key: first[key] for key in ("id", "object", "created", "model") if key in first}
        end = {**EMPTY[self._path], "logprobs": None, "finish_reason": "abort", "stop_reason": None} if places else {}
        events = ({**head, "choices": [{"index": place, **end}]} for place in places)
        return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def _event(body: bytes) -> dict[str, Any]:
    return orjson.loads(body[len(b"data: ") :].partition(b"\n\n")[0])


class _LineReporter:
    """An answer in one piece as lines of JSON."""

    def __init__(self, send: Any, request: RequestProgress) -> None:
        self._send = send
        self._request = request
        self._begun = self._over = False
        self._start: dict[str, Any] = {}
        self._answer = bytearray()

    async def serve(self, app: Any, scope: Any, receive: Any) -> None:
        reporter = asyncio.create_task(self._report(), name="penstock-progress")
        try:
            await app(scope, receive, self._keep)
        finally:
            self._over = True
            self._request.moved.set()
            await asyncio.wait((reporter,))
        status = self._start["status"]
        if status == OK or self._begun:
            samples, versions = self._request.take_updates(), self._request.spans()
            report = orjson.dumps({"status": status, "samples": samples, "versions": versions})
            await self._line(report[:-1] + b',"answer":' + self._json() + b"}\n", last=True)
        else:
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": bytes(self._answer)})

    async def _report(self) -> None:
        while True:
            await self._request.moved.wait()
            if self._over:
                return
            self._request.moved.clear()
            await self._line(orjson.dumps({"samples": self._request.take_updates()}) + b"\n")

    def _json(self) -> bytes:
        """The answer as it is: vLLM's JSON is one line. What is none, such as a proxy's error page, as a string."""
        types = [value for name, value in self._start["headers"] if name.lower() == b"content-type"]
        is_json = types and types[0].startswith(b"application/json")
        return bytes(self._answer) if is_json else orjson.dumps(self._answer.decode(errors="replace"))

    async def _keep(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._answer += message.get("body", b"")

    async def _line(self, line: bytes, *, last: bool = False) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", LINES_TYPE.encode())]
            await self._send({"type": "http.response.start", "status": OK, "headers": headers})
        await self._send({"type": "http.response.body", "body": line, "more_body": not last})
