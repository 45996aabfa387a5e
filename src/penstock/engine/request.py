"""Send one generation request until its answer is whole, also where engines die under it.

The engine reports what each sample has so far: token ids, logprobs, versions (`wire.PROGRESS_HEADER`). If it dies or
releases the request, the client sends the request again with that (`wire.RESUME_ARG`). The next engine goes on where
the other stopped (`plugin/hooks.py`). Its detokenizer, stop strings, logprobs and usage have the state that they
would have had if it had made those tokens itself. So the answer is whole; a pause or a sleep does not even cut it.

A cut does change three things:

- With a seed, the random numbers begin anew behind the cut.
- `presence_penalty` and `frequency_penalty` count tokens from the cut on.
- Grammar-constrained output (`response_format`, structured outputs, a tool choice that is `required` or named) and
  answers with prompt logprobs cannot be resumed, since the engine's grammar begins at its beginning. Their samples are
  made again from the start; `Counters.wasted_tokens` counts the tokens that are lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import orjson

from penstock import wire
from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError
from penstock.http import HttpTransport, Reply, UnreachableError
from penstock.parsing import reading
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import Notes, add_stretch, finish_of, spans_of

DEAD_STATUS = frozenset({500, 502, 504})
"""What vLLM answers when its engine core has died under a request, and proxies when vLLM itself has."""
RETRY_S = (0.0, 0.25, 0.5, 1.0)
"""Seconds before the request is sent again after its first, second, ... death without a new token. A dying vLLM answers
500 for up to a second, and it takes a fleet as long to notice. After so many and one more the request is given up: what
ends an engine ends the next one at the same token."""
MAX_DEATHS = 20
"""Of one request in all."""
IDLE_ABORT_S = 0.1
"""Wait before a request is sent again that an engine has aborted twice without a token."""
NO_REPORTS = (
    "answered without progress reports, so it runs without Penstock's plugin; attach it to a fleet "
    "(docs/how-to/other-servers.md)"
)


@dataclass(slots=True)
class Counters:
    """What a client did so that no token was lost, since it was made."""

    continued: int = 0
    """Requests sent again because an engine released or aborted them."""
    deaths: int = 0
    """Requests sent again because their engine died under them."""
    requeued_tokens: int = 0
    """Tokens that were made and went back to an engine as part of the prompt."""
    wasted_tokens: int = 0
    """Tokens that had arrived and were thrown away. Those made after an engine's last report before its death, at most
    `stream_chunk_tokens` a sample, cannot be counted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's whole answer.

    Attributes:
        body: as its endpoint has it; of the token endpoint without the tokens, which are in the request's `partials`.
        spans: for each of its choices `[[version, start, end], ...]`; None where the engine does not say.
    """

    body: Any
    spans: list[Any] | None


class UnreportedReplies:
    """Reads the replies of engines that report no progress, since they run without our plugin.

    This class refuses them. That of `engine/vanilla/` reads them; it plugs in at `ClientState.unreported`.
    """

    def check(self, params: SamplingParams) -> None:
        """Raise MissingCapabilityError if an engine cannot do what a token request asks for."""

    async def answer(self, request: Continuation, reply: Reply) -> Answer:
        """Return the whole answer; a sample left cut makes the client send the request again."""
        request.client.http.decode(await reply.read())  # what is not JSON, such as a proxy's page, is shown
        raise EngineError(NO_REPORTS, engine=request.client.http.name)

    def events(self, request: Any, reply: Reply) -> AsyncGenerator[dict[str, Any]]:  # noqa: ARG002
        """Yield the events of a stream (`openai.Stream`)."""
        raise EngineError(NO_REPORTS, engine=request.client.http.name)


@dataclass(slots=True)
class ClientState:
    """What all requests of one client share.

    Attributes:
        http: to an engine, or to the router in front of many.
        chunk_tokens: an engine reports what a sample has each time it has so many tokens more; 0: at the end only.
        counters: of the client.
        unreported: reads the replies of engines without our plugin.
        aborted_at: when the caller last asked to end all requests, by the loop's clock.
    """

    http: HttpTransport
    chunk_tokens: int
    counters: Counters = field(default_factory=Counters)
    unreported: UnreportedReplies = field(default_factory=UnreportedReplies)
    aborted_at: float = float("-inf")


class Continuation:
    """One generation request with one prompt.

    Args:
        client: whose request it is.
        path, body, headers: of the request.
        timeout_s: seconds for the whole answer, all waiting included.

    Attributes:
        partials: what its samples have so far.
        sent_at: when it was last sent, by the loop's clock.
    """

    def __init__(
        self, client: ClientState, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self.client = client
        self.path = path
        self.body = body
        self.headers = headers
        self.partials = Partials()
        self.sent_at = 0.0
        self._timeout_s = timeout_s
        self._end = asyncio.get_running_loop().time() + timeout_s
        self._deaths = self._deaths_in_all = self._idle_aborts = 0
        self.reported = 0
        """Tokens that were reported since it was last sent."""

    @property
    def passed_on(self) -> bool:
        """The caller has seen a part of its stream; see `openai.Stream`."""
        return False

    def part(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Self:
        """Make another request of the same client and endpoint, with the time that this one has left."""
        return type(self)(self.client, self.path, body, headers=headers, timeout_s=self._left_s())

    async def answer(self) -> Answer:
        """Return the whole answer.

        Raises:
            DeadlineError, EngineDeadError, EngineHTTPError: as of one call, or after too many deaths of engines.
        """
        headers = {**self.headers, wire.PROGRESS_HEADER: str(self.client.chunk_tokens)}
        while True:
            try:
                async with self.sent(headers) as reply:
                    answer = await self._read(reply)
            except EngineError as error:
                await self.after_death(error)
                continue
            if not self.partials.cut:
                return answer
            await self.after_abort()

    def _left_s(self) -> float:
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout_s:g} s", seconds=self._timeout_s)
        return left

    def sent(self, headers: Mapping[str, str]) -> Any:
        """Send the request with what its samples have; a context manager that gives the reply."""
        left = self._left_s()
        self.reported = 0
        self.sent_at = asyncio.get_running_loop().time()
        return self.client.http.stream("POST", self.path, self._data(), timeout_s=left, headers=headers)

    def _data(self) -> bytes:
        resume = self.partials.resume()
        if resume is None:
            return orjson.dumps(self.body)
        body = dict(self.body)
        if "sampling_params" in body:
            params: dict[str, Any] = body["sampling_params"]
            body["sampling_params"] = {**params, "extra_args": {wire.RESUME_ARG: resume}}
        else:
            given: Any = body.get("vllm_xargs")
            extra = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            body["vllm_xargs"] = {**extra, wire.RESUME_ARG: resume}
        return orjson.dumps(body)

    async def _read(self, reply: Reply) -> Answer:
        if reply.content_type != wire.LINES_TYPE:
            return await self.client.unreported.answer(self, reply)
        async for line in reply.lines():
            report: dict[str, Any] = self.client.http.decode(line)
            self.reported += self.partials.add(report["samples"])
            if "answer" in report:
                if report["status"] >= 300:  # noqa: PLR2004 - HTTP's own boundary
                    raise self.client.http.http_error(report["status"], orjson.dumps(report["answer"]))
                return Answer(report["answer"], report["versions"])
        raise EngineDeadError("its answer broke off", engine=self.client.http.name)

    async def after_death(self, error: EngineError) -> None:
        """Return when the request may be sent again; raise where that cannot help."""
        http = isinstance(error, EngineHTTPError)
        if isinstance(error, UnreachableError) or not (http or isinstance(error, EngineDeadError)):
            raise error
        if isinstance(error, EngineHTTPError) and error.status not in DEAD_STATUS:
            raise error
        self._deaths = 0 if self.reported else self._deaths
        self._deaths_in_all += 1
        if self._deaths == len(RETRY_S) or self._deaths_in_all == MAX_DEATHS:
            if http:
                raise error
            raise EngineDeadError(
                f"given up: {self._deaths_in_all} times an engine died under this request, the last: {error}"
            ) from error
        delay = RETRY_S[self._deaths]
        self._deaths += 1
        self.client.counters.deaths += 1
        self._requeue()
        if self.client.http.suspect is not None:
            await self.client.http.suspect()
        await asyncio.sleep(delay)

    async def after_abort(self) -> None:
        """Send it again at once: the engine or the router's gate holds it until generation is resumed."""
        self.client.counters.continued += 1
        self._idle_aborts = 0 if self.reported else self._idle_aborts + 1
        self._requeue()
        if self._idle_aborts > 1:
            await asyncio.sleep(IDLE_ABORT_S)

    def _requeue(self) -> None:
        """Prepare the samples to be sent; raise where a stream that the caller has seen would begin again."""
        for sample in self.partials:
            if sample.ended:
                continue
            sample.finish = None
            if sample.whole_only:
                if self.passed_on:
                    raise EngineError(
                        "a stream was cut that cannot be resumed in the middle (grammar-constrained output, prompt "
                        "logprobs, or an engine without Penstock's plugin); ask for it without stream"
                    )
                self.client.counters.wasted_tokens += sample.forget()
            self.client.counters.requeued_tokens += len(sample.ids)


# --- What the samples of a request have so far, as engines report it -------------------------------------------------


@dataclass(slots=True)
class Partial:
    """One sample so far; the fields are those of `wire.SampleReport`.

    Attributes:
        logprobs: the JSON text of each report. They go back to an engine as they came: as Python's lists they would
            take ten times the memory.
        versions: `[version, tokens]` of each stretch made under one version, with `wire.Notes` where there are any;
            together they cover `ids`.
        stop_reason: the stop string or stop token id that ended it, as vLLM has it.
    """

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[str] = field(default_factory=list[str])
    versions: list[list[Any]] = field(default_factory=list[list[Any]])
    finish: str | None = None
    stop_reason: int | str | None = None
    asked: bool = False
    whole_only: bool = False

    @property
    def cut(self) -> bool:
        """It was cut off and is to go on; vLLM's `error`, which comes with a 500, is a cut too."""
        return self.finish == "error" or (self.finish == "abort" and not self.asked)

    @property
    def ended(self) -> bool:
        """Nothing more is to come."""
        return self.finish is not None and not self.cut

    def add(self, report: Mapping[str, Any]) -> None:
        """Add a `SampleReport`."""
        self.ids += report["ids"]
        if report.get("logprobs") is not None:
            self.logprobs.append(report["logprobs"])
        for stretch in report["versions"]:
            add_stretch(self.versions, *stretch)
        self.finish, self.stop_reason = report.get("finish"), report.get("stop_reason")
        self.asked, self.whole_only = bool(report.get("asked")), bool(report.get("whole_only"))

    def join(self, rest: Partial) -> None:
        """Append what another request made of the rest of this sample."""
        end = {"finish": rest.finish, "stop_reason": rest.stop_reason, "asked": rest.asked}
        self.add({"ids": rest.ids, "versions": rest.versions, **end})
        self.logprobs += rest.logprobs

    def forget(self) -> int:
        """Begin again from nothing; return how many tokens are thrown away."""
        wasted = len(self.ids)
        self.ids, self.logprobs, self.versions, self.finish, self.stop_reason = [], [], [], None, None
        return wasted

    def as_json(self) -> dict[str, Any]:
        """Return what an engine needs to resume it (`wire.check_part`)."""
        return {
            "ids": self.ids,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "finish": self.finish if self.ended else None,
            "stop_reason": self.stop_reason if self.ended else None,
        }


def span_of(version: int, start: int, end: int, notes: Notes | None = None) -> VersionSpan:
    """Read a span of the wire, `[version, start, end]` or `[version, start, end, notes]`."""
    return VersionSpan(version, start, end, **(notes or {}))


def sample_of(part: Partial, params: SamplingParams) -> Sample:
    """Return what a sample has, as an answer has it; `abort` where it is to go on.

    Raises:
        EngineError: its parts do not fit together (a logprob and a version for each token).
    """
    length = len(part.ids)
    logprobs = None
    if params.logprobs:
        with reading("logprobs of the engine", EngineError):
            logprobs = tuple(float(position[0][1]) for chunk in part.logprobs for position in orjson.loads(chunk))
        if len(logprobs) != length:
            raise EngineError(f"the engine reported {length} tokens but {len(logprobs)} logprobs")
    spans = tuple(span_of(*span) for span in spans_of(part.versions))
    if (spans[-1].end if spans else 0) != length:
        raise EngineError(f"the weight versions {part.versions} do not cover the {length} reported tokens exactly")
    return Sample(tuple(part.ids), finish_of(part.finish or "abort"), logprobs, spans)


def whole_of(part: Partial, params: SamplingParams, spans: Sequence[Sequence[int]]) -> Sample:
    """Return a sample that has ended.

    Args:
        part: all that was reported of it.
        params: of the request.
        spans: `[[version, start, end], ...]` of it, as the engine counts them at its end.

    Raises:
        EngineError: its parts do not fit together (a logprob and a version for each token); no report says how it
            ended; or a token was reported twice or never.
    """
    length = len(part.ids)
    if part.finish is None:
        raise EngineError(f"the answer has ended, but the engine reported {length} tokens of it and no end")
    if (made := spans[-1][2] if spans else 0) != length:
        raise EngineError(f"the engine made {made} tokens of a sample but reported {length}")
    return sample_of(part, params)


class Partials:
    """The samples of one request, by index."""

    def __init__(self) -> None:
        self._samples: dict[int, Partial] = {}

    def __iter__(self) -> Iterator[Partial]:
        return iter(self._samples.values())

    def get(self, index: int) -> Partial:
        """Return sample `index`, empty before the first report of it."""
        return self._samples.setdefault(index, Partial())

    def add(self, reports: Iterable[Mapping[str, Any]]) -> int:
        """Add the reports of several samples; return the number of new tokens."""
        tokens = 0
        for report in reports:
            self.get(report["index"]).add(report)
            tokens += len(report["ids"])
        return tokens

    @property
    def cut(self) -> bool:
        """Some are to go on."""
        return any(sample.cut for sample in self._samples.values())

    def resume(self) -> str | None:
        """Return the value of `RESUME_ARG`; None where there is nothing to resume."""
        if not any(sample.ids for sample in self._samples.values()):
            return None
        size = 1 + max(self._samples)
        return orjson.dumps([self.get(i).as_json() for i in range(size)]).decode()
