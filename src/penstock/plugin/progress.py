"""Counts the tokens of every request in flight, and reports them to its client, in lines of JSON (`wire.py`).

`answers.py` adds the reports to answers that stay vLLM's own.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import orjson

from penstock.rooms import plugged_in
from penstock.wire import LINES_TYPE, STREAM_PROGRESS, Notes, SampleReport, add_stretch, spans_of

OK = 200
FLOOR = -9999.0
"""Lowest reported logprob, as in vLLM's own answers."""
CURRENT: ContextVar[RequestProgress | None] = ContextVar("penstock_in_flight", default=None)
"""The HTTP request that this task serves."""


# --- The progress of a request ---------------------------------------------------------------------------------------


class SampleProgress:
    """One sample in flight. `state` is vLLM's RequestState."""

    def __init__(self, state: Any, place: int, *, whole_only: bool) -> None:
        self.state = state
        self.place = place
        self.core = 0
        """Number of the engine core that makes it."""
        self.versions: list[list[Any]] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._whole_only = whole_only
        self._counted = 0
        self._reported = 0
        self._finish_reported = False
        self._unreported: list[list[Any]] = []

    @property
    def unreported(self) -> int:
        """Number of tokens that are not reported yet."""
        return self._counted - self._reported

    @property
    def has_updates(self) -> bool:
        return self.unreported > 0 or (self.finish is not None and not self._finish_reported)

    def total(self) -> int:
        return self.state.detokenizer.num_output_tokens()

    def made(self, start: int, end: int) -> tuple[list[int], str | None]:
        """Return ids and logprobs of tokens. NaN and lower values become `FLOOR`."""
        ids = list(self.state.detokenizer.output_token_ids[start:end])
        if (logprobs := self.state.logprobs_processor.logprobs) is None or start == end:
            return ids, None
        entries = [
            [[token, max(FLOOR, entry.logprob), entry.rank, entry.decoded_token] for token, entry in position.items()]
            for position in logprobs[start:end]
        ]
        return ids, orjson.dumps(entries).decode()

    def begin(self, versions: list[list[Any]]) -> None:
        """Start with tokens of another engine, which the reader already has."""
        self.versions = [list(part) for part in versions]
        self._counted = self._reported = sum(stretch[1] for stretch in versions)

    def count(self, version: int, notes: Notes | None = None) -> None:
        """Count new tokens under this version and these notes."""
        if (total := self.total()) == self._counted:
            return
        for parts in (self.versions, self._unreported):
            add_stretch(parts, version, total - self._counted, notes)
        self._counted = total

    def take_updates(self, *, asked: bool) -> SampleReport:
        """Take the unreported part, in the form that `engine.partial.Partial.add` reads."""
        ids, logprobs = self.made(self._reported, self._counted)
        self._reported = self._counted
        versions, self._unreported = self._unreported, []
        self._finish_reported = self.finish is not None
        return {
            "index": self.place,
            "ids": ids,
            "logprobs": logprobs,
            "versions": versions,
            "finish": self.finish,
            "stop_reason": self.stop_reason,
            "asked": asked,
            "whole_only": self._whole_only,
        }


class RequestProgress:
    """One HTTP request and its samples.

    Attributes:
        asked: whether a client asked for the abort.
        moved: set when a sample has a chunk to report; cleared by its reporter.
        streamed: whether the client gets every token by `take_updates`, and needs none in the answer.
    """

    def __init__(self, chunk_tokens: int = 0, *, streamed: bool = False) -> None:
        self.asked = False
        self.moved = asyncio.Event()
        self.streamed = streamed
        self.samples: dict[str, SampleProgress] = {}
        """Samples by vLLM's internal request id."""
        self.names: set[str] = set()
        """Names of its prompts, by which other calls can abort them."""
        self.to_finish: dict[str, tuple[SampleProgress, dict[str, Any]]] = {}
        """Samples that ended on another engine, with their partials."""
        self._chunk_tokens = chunk_tokens

    def add(self, request: Any, state: Any) -> SampleProgress:
        params = request.sampling_params
        samples = state.parent_req.n if state.parent_req is not None else 1
        external = state.parent_req.external_req_id if state.parent_req is not None else state.external_req_id
        # A partial becomes a part of the prompt: a grammar would start after it, and prompt logprobs would cover it.
        whole_only = bool(
            getattr(params, "structured_outputs", None)
            or params.prompt_logprobs is not None
            or request.prompt_token_ids is None
        )
        sample = SampleProgress(state, _prompt_number(external) * samples + state.request_index, whole_only=whole_only)
        self.samples[request.request_id] = sample
        self.names.add(external)
        return sample

    def count(
        self, sample: SampleProgress, made_by: tuple[int, Notes | None], finish: Any, stop_reason: int | str | None
    ) -> None:
        """Count a sample's new tokens under this version and notes, and note its end."""
        sample.count(*made_by)
        if finish is not None:
            sample.finish, sample.stop_reason = str(finish), stop_reason
        if self._chunk_tokens and sample.unreported >= self._chunk_tokens:
            self.moved.set()

    def lighten(self, output: Any) -> Any:
        """Remove the tokens from vLLM's RequestOutput if the client has them.

        vLLM's event loop needs 10 ms to write 512 tokens. 0.26 has None for samples that it has not added yet. An
        exception here would end its output handler, and so every request.
        """
        if self.streamed and output is not None:
            for completion in filter(None, output.outputs):
                completion.token_ids = []
                completion.logprobs = None if completion.logprobs is None else []
        return output

    def take_updates(self) -> list[SampleReport]:
        """Take the unreported part of each sample."""
        return [sample.take_updates(asked=self.asked) for sample in self.samples.values() if sample.has_updates]

    def spans(self) -> list[list[list[Any]]]:
        """Return each sample's `[version, start, end]` parts, prompt by prompt; empty without tokens."""
        by_place = {sample.place: spans_of(sample.versions) for sample in self.samples.values()}
        return [by_place.get(place, []) for place in range(1 + max(by_place, default=-1))]


def _prompt_number(external_request_id: str) -> int:
    """Return the prompt's number from vLLM's id of a completion: `cmpl-NAME-3`."""
    number = external_request_id.rpartition("-")[2]
    return int(number) if external_request_id.startswith("cmpl-") and number.isdecimal() else 0


# --- The reports -----------------------------------------------------------------------------------------------------


async def serve(app: Any, scope: Any, receive: Any, send: Any, request: RequestProgress, wanted: bytes | None) -> None:
    """Let `app` answer, and add the reports that `wanted` (the value of `PROGRESS_HEADER`) requests."""
    if wanted is not None and wanted.isdigit():
        await _LineReporter(send, request).serve(app, scope, receive)
        return
    reporter = plugged_in("progress.answers")(send, request, scope["path"], progress=wanted == STREAM_PROGRESS.encode())
    await app(scope, receive, reporter.send)


class _LineReporter:
    """Sends an answer in one piece as lines of JSON."""

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
        """Return a JSON answer, which is one line, as it is, and others as a string."""
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
