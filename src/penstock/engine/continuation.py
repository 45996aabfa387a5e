"""One request that ends when its answer is whole, through the deaths of engines that work on it.

While it works, the engine tells what each sample has so far: token ids, logprobs, versions (`wire.PROGRESS_HEADER`).
Where the engine dies, or releases the request, it is sent again with that (`wire.RESUME_ARG`), and the engine that gets
it goes on where the other stopped, its detokenizer, stop strings, logprobs and usage in the state they would have had,
had it made those tokens itself (`vllm_plugin/resume.py`). So its answer is the whole answer, and text, stop
strings, `min_tokens`, tool calls and usage are right across the seam; of the token endpoint it is what all of them have
told. A pause or a sleep makes no seam.

What a seam does change:

- With a seed, the random numbers begin anew behind it.
- `presence_penalty` and `frequency_penalty` count tokens from the seam on.
- Grammar-constrained output (`response_format`, structured outputs, a tool choice that is `required` or named) and
  answers with prompt logprobs cannot be taken up in the middle, since the engine's grammar begins at its beginning:
  their samples are made again from the start, and the tokens so lost are counted in `Counters.wasted_tokens`.

Among engines without our plugin (`PlainEngines`) nothing is taken up: see `joining.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from penstock.engine import wire
from penstock.engine.joining import HandedOverError, PlainEngines, take_in
from penstock.engine.partial import Partials
from penstock.engine.seam import Seam
from penstock.engine.transport import HttpTransport, Reply, UnreachableError
from penstock.engine.wire import GENERATE
from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError

DEAD_STATUS = frozenset({500, 502, 504})
"""What vLLM answers when its engine core has died under a request, and proxies when vLLM itself has."""
DONE = b"data: [DONE]"
RETRY_S = (0.0, 0.25, 0.5, 1.0)
"""Seconds before the request is sent again after its first, second, ... death without a new token. A dying vLLM answers
500 for up to a second, and it takes a fleet as long to notice. After so many and one more the request is given up: what
ends an engine ends the next one at the same token."""
MAX_DEATHS = 20
"""Of one request in all."""
IDLE_ABORT_S = 0.1
"""Wait where an engine has aborted a request twice without a token, lest one that aborts everything be besieged."""


@dataclass(slots=True)
class Counters:
    """What a client had to do so that nothing was lost, since it was made."""

    continued: int = 0
    """Requests sent again after an engine had released them, or, without our plugin, a pause had aborted them."""
    deaths: int = 0
    """Requests sent again because their engine died under them."""
    requeued_tokens: int = 0
    """Tokens that were made and went back to an engine as part of the prompt."""
    wasted_tokens: int = 0
    """Tokens that had arrived and were thrown away. Those made after an engine's last word before its death, at most
    `stream_chunk_tokens` a sample, nobody can count."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's whole answer.

    Attributes:
        body: as its endpoint has it.
        spans: for each of its choices `[[version, start, end], ...]`, where our plugin gave it.
        told: of the token endpoint: the tokens are in the request's `partials`, and not in `body`.
    """

    body: Any
    spans: list[Any] | None
    told: bool = False


class Continuation:
    """One generation request with one prompt.

    Args:
        http: of an engine, or of the router in front of many.
        path: of the endpoint.
        body: for it.
        headers: to be sent with it.
        timeout_s: seconds for the whole answer, all waiting included.
        chunk_tokens: the engine tells what a sample has each time it has so many tokens more; 0: at the end only.
        counters: to count in.
        plain: engines without our plugin that may get it.
        deaths: of engines, under what this request goes on with.
    """

    def __init__(
        self,
        http: HttpTransport,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        chunk_tokens: int,
        counters: Counters,
        plain: PlainEngines | None = None,
        deaths: int = 0,
    ) -> None:
        self.partials = Partials()
        self._http = http
        self._path = path
        self._body = body
        self._headers = headers
        self._timeout_s = timeout_s
        self._end = asyncio.get_running_loop().time() + timeout_s
        self._chunk_tokens = chunk_tokens
        self._counters = counters
        self._plain = plain or PlainEngines()
        self._sent_in = 0
        self._aborts = 0
        self._told = False
        """The engine at work has our plugin."""
        self._deaths, self._deaths_in_all = 0, deaths
        self._idle_aborts = 0
        self._news = 0

    async def answer(self) -> Answer:
        """The whole answer.

        Raises:
            DeadlineError, EngineDeadError, EngineHTTPError: as of one call; the deaths of several engines in a row
                under this request are an error too.
            HandedOverError: of the token endpoint, where an engine without our plugin may have to go on.
        """
        headers = {**self._headers, wire.PROGRESS_HEADER: str(self._chunk_tokens)}
        while True:
            self._news = 0
            try:
                async with self._sent(headers) as reply:
                    answer = await self._read(reply)
            except EngineError as error:
                await self._after(error)
                self._hand_over()
                continue
            if not self.partials.cut:
                return answer
            await self._after_abort()
            self._hand_over()

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, of an OpenAI body with `stream`; raises as `answer` does.

        Each choice's last event has its `weight_versions`, in the form of vLLM's token endpoint.
        """
        headers = {**self._headers, wire.PROGRESS_HEADER: wire.STREAM_PROGRESS}
        seam = Seam()
        while True:
            self._news = 0
            try:
                async with self._sent(headers) as reply:
                    async for chunk in self._events(reply):
                        if (new := seam.new(chunk)) is not None:
                            yield new
            except EngineError as error:
                await self._after(error, passed_on=seam.passed_on)
            else:
                if not self.partials.cut:
                    return
                await self._after_abort(passed_on=seam.passed_on)
            seam.again()

    def _sent(self, headers: Mapping[str, str]) -> Any:
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout_s:g} s", seconds=self._timeout_s)
        self._told, self._aborts = False, self._plain.aborts
        self._sent_in = self._plain.stretches.last if self._plain.stretches is not None else 0
        return self._http.stream("POST", self._path, self._data(), timeout_s=left, headers=headers)

    def _data(self) -> bytes:
        resume = self.partials.resume()
        if resume is None:
            return orjson.dumps(self._body)
        body = dict(self._body)
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
            spans = wire.versions_of(reply.headers.get(wire.SPANS_HEADER))
            body = self._http.decode(await reply.read())
            return Answer(body, spans) if spans is not None else self._of_plain(body)
        async for line in reply.lines():
            event: dict[str, Any] = self._http.decode(line)
            self._news += self.partials.add(event["samples"])
            if "answer" in event:
                if event["status"] >= 300:  # noqa: PLR2004 - HTTP's own boundary
                    raise self._http.http_error(event["status"], orjson.dumps(event["answer"]))
                return Answer(event["answer"], event["versions"], told=self._path == GENERATE)
        raise EngineDeadError("its answer broke off", engine=self._http.name)

    async def _events(self, reply: Reply) -> AsyncGenerator[dict[str, Any]]:
        async for line in reply.lines():
            if line.startswith(wire.COMMENT):
                self._told = True
                told: dict[str, Any] = orjson.loads(line[len(wire.COMMENT) :])
                self._news += self.partials.add(told.get("samples", ()))
            elif line.startswith(DONE):
                return
            elif line.startswith(b"data: "):
                event: dict[str, Any] = self._http.decode(line[6:])
                if "error" in event:  # [DONE] follows: without this it would look like an end
                    raise self._http.http_error(int(event["error"].get("code") or 500), line[6:])
                if not self._of_an_abort(event):
                    yield self._with_versions(event)
        raise EngineDeadError("its stream broke off", engine=self._http.name)

    def _of_plain(self, body: Any) -> Answer:
        """The answer of an engine without our plugin, which says of an abort no more than that.

        It has begun at the beginning, whatever it was given to take up.
        """
        self._counters.wasted_tokens += sum(sample.forget() for sample in self.partials)
        choices: list[dict[str, Any]] = body["choices"]
        usage: Any = body.get("usage")
        tokens = int(usage["completion_tokens"]) if usage else 0
        aborted = any(choice["finish_reason"] == "abort" for choice in choices)
        stretches = self._plain.stretches if self._plain.here() else None
        version = stretches.version_of(self._sent_in, aborted=aborted) if stretches is not None else None
        spans: list[Any] | None = None
        if self._path == GENERATE:
            spans = [wire.spans_of(choice, version) for choice in choices]
        elif version is not None and len(choices) == 1:
            spans = [[[version, 0, tokens]]]
        unlabelled = spans is not None and None in spans and stretches is not None
        if unlabelled or (aborted and self._path != GENERATE and not self._asked()):
            self._counters.wasted_tokens += tokens
            self.partials.get(0).finish = "abort"  # made again: nobody can say which weights made what, or join text
        elif aborted:
            own = [{**choice, "spans": its} for choice, its in zip(choices, spans or (), strict=False)]
            self._news += take_in(self.partials, own, asked=self._asked())
        return Answer(body, None if spans is None or None in spans else spans)

    def _asked(self) -> bool:
        """Somebody has ended all requests since this one was sent."""
        return self._plain.aborts > self._aborts

    def _of_an_abort(self, event: Mapping[str, Any]) -> bool:
        """Whether it ends what is to go on: its text may be the beginning of a stop string, so it comes again."""
        choices: list[dict[str, Any]] = event.get("choices") or []
        for choice in () if self._told else choices:
            if choice.get("finish_reason") == "abort" and not self._asked():
                self.partials.get(choice["index"]).finish = "abort"
        if not choices:
            return self.partials.cut  # usage
        return all(self.partials.get(choice["index"]).cut for choice in choices)

    def _with_versions(self, event: dict[str, Any]) -> dict[str, Any]:
        for choice in event.get("choices") or ():
            if choice.get("finish_reason") is not None:
                versions = self.partials.get(choice["index"]).versions
                choice["weight_versions"] = wire.as_weight_versions(versions) if self._told else None
        return event

    async def _after(self, error: EngineError, *, passed_on: bool = False) -> None:
        """Return when the request may be sent again; raise where that is of no use."""
        http = isinstance(error, EngineHTTPError)
        if isinstance(error, UnreachableError) or not (http or isinstance(error, EngineDeadError)):
            raise error
        if isinstance(error, EngineHTTPError) and error.status not in DEAD_STATUS:
            raise error
        self._deaths = 0 if self._news else self._deaths
        self._deaths_in_all += 1
        if self._deaths == len(RETRY_S) or self._deaths_in_all == MAX_DEATHS:
            if http:
                raise error
            raise EngineDeadError(
                f"given up: {self._deaths_in_all} times an engine died under this request, the last: {error}"
            ) from error
        delay = RETRY_S[self._deaths]
        self._deaths += 1
        self._counters.deaths += 1
        self._take_up(passed_on=passed_on)
        if self._http.suspect is not None:
            await self._http.suspect()
        await asyncio.sleep(delay)

    async def _after_abort(self, *, passed_on: bool = False) -> None:
        """Send it again at once: the engine or the router's gate holds it until generation is resumed."""
        self._counters.continued += 1
        self._idle_aborts = 0 if self._news else self._idle_aborts + 1
        self._take_up(passed_on=passed_on)
        if self._idle_aborts > 1:
            await asyncio.sleep(IDLE_ABORT_S)

    def _hand_over(self) -> None:
        """Let what the samples have be joined outside, where an engine may come next that takes nothing up."""
        if self._path == GENERATE and any(sample.ids for sample in self.partials) and self._plain.here():
            raise HandedOverError(self.partials, self._deaths_in_all)

    def _take_up(self, *, passed_on: bool) -> None:
        whole_only = bool(self._plain.here()) and (self._path != GENERATE or self._has_stop_strings())
        if whole_only and passed_on:
            raise EngineError(
                "a stream was cut that cannot be taken up: there are engines without Penstock's plugin; ask for it "
                "without stream, pause with mode keep, or launch all engines by Penstock"
            )
        for sample in self.partials:
            if sample.ended and not whole_only:
                continue
            sample.finish = None
            if sample.whole_only or whole_only:
                if passed_on:
                    raise EngineError(
                        "a stream was cut that cannot be taken up in the middle (grammar-constrained output or prompt "
                        "logprobs); ask for it without stream"
                    )
                self._counters.wasted_tokens += sample.forget()
            self._counters.requeued_tokens += len(sample.ids)

    def _has_stop_strings(self) -> bool:
        params: Any = self._body.get("sampling_params")
        return bool(params and params.get("stop"))
