"""Generates over HTTP, on one engine or through the router to many, even if engines die under a request.

The engine reports each sample's progress: token ids, logprobs, versions (`wire.PROGRESS_HEADER`). If it dies or
releases the request, the client sends the request again with this progress (`wire.RESUME_ARG`). The next engine
continues from there (`plugin/hooks.py`). Its detokenizer, stop strings, logprobs and usage have the same state as if it
had made those tokens itself. So the answer is whole. A pause or a sleep does not even cut it.

A cut changes three things:

- With a seed, the random numbers restart after the cut.
- `presence_penalty` and `frequency_penalty` only count tokens after the cut.
- Grammar-constrained output (`response_format`, structured outputs, a tool choice that is `required` or named) and
  answers with prompt logprobs cannot be resumed, because a grammar always starts at its beginning. Their samples are
  made again from the start. `Counters.wasted_tokens` counts the lost tokens.
"""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import orjson

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.checks import reading
from penstock.engine.partial import Partials, whole_of
from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError, RequestError
from penstock.http import MOST_DATA, HttpTransport, Reply, UnreachableError, as_json
from penstock.rooms import plugged_in
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId
from penstock.wire import GENERATE

STREAM_CHUNK_TOKENS = 64
LEAST_HASHED = 128
"""Shortest prompt in tokens that is hashed. Recomputing a shorter one costs less than finding it."""
DEAD_STATUS = frozenset({500, 502, 504})
"""HTTP statuses of vLLM after its engine core died under a request, and of proxies after vLLM itself died."""
RETRY_S = (0.0, 0.25, 0.5, 1.0)
"""Seconds before the request is sent again after its first, second, ... death without a new token. A dying vLLM answers
500 for up to a second, and the fleet needs as long to notice. One more death ends the request: what kills one engine
kills the next one at the same token."""
MAX_DEATHS = 20
"""Number of deaths in total after which a request is given up."""
IDLE_ABORT_S = 0.1
"""Seconds before a request is sent again after an engine aborted it twice without a new token."""
NO_REPORTS = (
    "answered without progress reports, so it runs without Penstock's plugin; attach it to a fleet "
    "(docs/how-to/other-servers.md)"
)


@dataclass(slots=True)
class Counters:
    """A client's work, since its creation, to lose no token."""

    continued: int = 0
    """Requests sent again because an engine released or aborted them."""
    deaths: int = 0
    """Requests and calls for text sent again because their engine died under them."""
    requeued_tokens: int = 0
    """Tokens that were sent back to an engine as part of the prompt."""
    wasted_tokens: int = 0
    """Tokens that arrived and were thrown away. Tokens after an engine's last report before its death, at most
    `stream_chunk_tokens` per sample, cannot be counted."""


class Answer(NamedTuple):
    """An engine's whole answer."""

    body: Any
    """Body of the endpoint. For the token endpoint, the tokens are in the request's `partials` instead."""
    spans: list[Any] | None
    """`[[version, start, end], ...]` for each choice; None if the engine does not report them."""


class DataClient:
    """Client of the generation endpoints. It sends each prompt as its own request, so a router can spread them.

    A request returns its whole answer even if engines release it or die under it. If `abort_generation` ends it, its
    finish reason is `abort`.

    Args:
        url: URL of an engine or of the router.
        api_key: key to send as a bearer token.
        request_timeout_s: deadline in seconds of one generation request, including held and paused time.
        name: name of the server in errors.
        vocab_size: if known, ids outside `[0, vocab_size)` are refused before anything is sent.
        stream_chunk_tokens: number of tokens per report of a sample. An engine's death costs a sample at most its last
            chunk. With 0, the engine reports once, at the end.
        routed: a router may place the requests by shared prefixes. Hashing a prompt of 32k tokens takes 1 ms.

    Attributes:
        counters: the client's work to lose no token.
        kept: returns the weight versions whose updates kept the KV cache.
        unreported: reads replies of engines without our plugin (`vanilla.VanillaReplies`); None refuses them.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        request_timeout_s: float = 3600.0,
        name: str | None = None,
        vocab_size: int | None = None,
        stream_chunk_tokens: int = STREAM_CHUNK_TOKENS,
        routed: bool = True,
    ) -> None:
        self.http = HttpTransport(url, api_key=api_key, name=name, most=MOST_DATA)
        self.vocab_size = vocab_size
        self.request_timeout_s = request_timeout_s
        self.stream_chunk_tokens = stream_chunk_tokens
        self.routed = routed
        self.counters = Counters()
        self.kept: Callable[[], Collection[int]] = tuple
        self.unreported: Any = None

    def replies_unreported(self) -> Any:
        """Return `unreported`. EngineError: it is None."""
        if self.unreported is None:
            raise EngineError(NO_REPORTS, engine=self.http.name)
        return self.unreported

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2), in input order. A prompt's samples stay together."""
        params = SamplingParams.of(batch.sampling_params)
        sessions: Sequence[SessionId | None] = [None] * len(batch) if batch.session_ids is None else batch.session_ids
        if batch.prompt_token_ids is not None:
            numbered = enumerate(batch.prompt_token_ids)
            prompts = [self._checked_ids(ids, f"prompt_token_ids[{i}]") for i, ids in numbered]
        else:
            given = () if batch.prompts is None else batch.prompts  # numpy's arrays have no truth value
            prompts = await all_or_first_error(self.tokenize(prompt) for prompt in given)
            if [] in prompts:
                raise RequestError(f"prompts[{prompts.index([])}] has no token; give at least one")
        groups = await all_or_first_error(
            self._generate(ids, params, session, group, batch.adapter)
            for ids, session, group in zip(prompts, sessions, _group_ids(prompts), strict=True)
        )
        return GenerateOutput.of([sample for group in groups for sample in group])

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Sample]:
        """Draw `num_samples` samples of one prompt as one n-way request (R3)."""
        ids = self._checked_ids(prompt_token_ids, "prompt_token_ids")
        if not ids:
            raise RequestError("prompt_token_ids is empty")
        given = SamplingParams.of(sampling_params)
        if given.n not in (1, num_samples):
            raise RequestError(f"num_samples is {num_samples}, and sampling parameter n is {given.n}; leave n out")
        params = given if given.n == num_samples else replace(given, n=num_samples)
        return await self._generate(ids, params, session_id, adapter=adapter)

    async def tokenize(self, prompt: Sequence[Message] | str) -> list[int]:
        """Return the token ids of a string, or of a chat with the assistant's opening."""
        body: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return list((await self._asked("/tokenize", body, self._end()))["tokens"])

    async def detokenize(self, token_ids: Sequence[int], *, end: float | None = None) -> str:
        """Return the text of token ids by the loop's time `end`, else by the deadline."""
        end = self._end() if end is None else end
        return str((await self._asked("/detokenize", {"tokens": list(token_ids)}, end))["prompt"])

    def headers_of(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session_id: SessionId | None = None,
        group_id: str | None = None,
    ) -> dict[str, str]:
        """Return headers for placement without parsing the body (docs/protocol.md).

        Equal session ids go to one engine. `group_id` groups samples of one prompt that are sent one by one.
        """
        hashed = self.routed and len(ids) >= LEAST_HASHED
        headers = {
            wire.EXPECTED_TOKENS_HEADER: params.max_tokens * params.n,
            wire.PROMPT_TOKENS_HEADER: len(ids),
            wire.SESSION_HEADER: session_id,
            wire.GROUP_HEADER: group_id,
            wire.PREFIX_HASHES_HEADER: plugged_in("prefix_hashes")(ids) if hashed else None,
        }
        return {name: str(value) for name, value in headers.items() if value is not None}

    async def close(self) -> None:
        """Close the connections for good. Requests in flight fail and are not sent again."""
        await self.http.end()

    def _end(self) -> float:
        return asyncio.get_running_loop().time() + self.request_timeout_s

    async def _generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        session_id: SessionId | None,
        group_id: str | None = None,
        adapter: str | None = None,
    ) -> list[Sample]:
        if self.unreported is not None:
            self.unreported.check(params)
        end = self._end()
        headers = self.headers_of(token_ids, params, session_id, group_id)
        body = wire.generate_body(token_ids, params, adapter=adapter)
        request = ResumableRequest(self, GENERATE, body, headers=headers, timeout_s=self.request_timeout_s)
        answer = await request.answer()
        parts = [request.partials.get(i) for i in range(params.n)]
        made = [
            (self._kv_labelled(whole_of(part, params, spans)), part.stop_reason)
            for part, spans in zip(parts, wire.padded(answer.spans or (), params.n), strict=False)
        ]
        if _reports_experts(answer.body):
            made = plugged_in("experts.add")(made, answer.body, len(token_ids))
        if not params.detokenize:
            return [sample for sample, _ in made]
        texts = await all_or_first_error(self._text(sample, params, stop, end) for sample, stop in made)
        return [replace(sample, text=text) for (sample, _), text in zip(made, texts, strict=True)]

    def _kv_labelled(self, sample: Sample) -> Sample:
        kept = self.kept()
        if not any(span.version in kept for span in sample.spans):
            return sample
        return replace(sample, spans=tuple(replace(s, kv_kept=s.kv_kept or s.version in kept) for s in sample.spans))

    async def _text(self, sample: Sample, params: SamplingParams, stop: int | str | None, end: float) -> str:
        ids = sample.token_ids
        ended_by_token = sample.finish_reason == "stop" and not isinstance(stop, str)
        if ids and params.skip_special_tokens and ended_by_token:
            # vLLM's /detokenize shows special tokens. Its other endpoints omit the special token that ended the text.
            ids = ids if ids[-1] in params.stop_token_ids else ids[:-1]
        text = await self.detokenize(ids, end=end) if ids else ""
        # A stop string ends with the last token, so it is the last of its kind. As in vLLM, the text omits it.
        return text[: text.rfind(stop)] if isinstance(stop, str) and stop in text else text

    async def _asked(self, path: str, body: Mapping[str, Any], end: float) -> Any:
        """Return the answer to a call without side effects. Repeat it like a request."""
        if (left := end - asyncio.get_running_loop().time()) <= 0:
            raise DeadlineError(f"no time is left for {path}: request_timeout_s is over", seconds=0.0)
        return (await _Question(self, path, body, headers={}, timeout_s=left).answer()).body

    def _checked_ids(self, given: Sequence[int], where: str) -> list[int]:
        """Return Python ints, because those of numpy and torch cannot be sent."""
        ids: list[int] | None = None
        if not isinstance(given, (bytes, bytearray)):  # a text, although its items are ints
            with suppress(TypeError):
                ids = list(map(operator.index, given))
        if ids is None:
            raise RequestError(f"{where} must be a list of token ids, got {str(given)[:80]}")
        top = self.vocab_size
        if not ids or (min(ids) >= 0 and (top is None or max(ids) < top)):
            return ids
        position, token = next((i, t) for i, t in enumerate(ids) if t < 0 or (top is not None and t >= top))
        known = f"[0, {top})" if top is not None else "the non-negative integers"
        raise RequestError(f"{where}[{position}] is {token}, outside the vocabulary {known}")


def _reports_experts(body: Any) -> bool:
    choices: Any = cast("Mapping[str, Any]", body).get("choices") if isinstance(body, dict) else None
    return any(choice.get("routed_experts") for choice in choices or ())


def _group_ids(prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """Return an id for each repeated prompt, so that a router spreads its samples."""
    keys = [tuple(ids) for ids in prompts]
    repeated = {key: secrets.token_hex(8) for key, count in Counter(keys).items() if count > 1}
    return [repeated.get(key) for key in keys]


def _died(error: EngineError) -> bool:
    """Whether an engine died under a call. An unreachable engine got no call."""
    if isinstance(error, EngineHTTPError):
        return error.status in DEAD_STATUS
    return isinstance(error, EngineDeadError) and not isinstance(error, UnreachableError)


class ResumableRequest:
    """One generation request with one prompt, sent until its answer is whole.

    Args:
        client: client that makes the request.
        path, body, headers: parts of the request.
        timeout_s: seconds for the whole answer, including all waiting.

    Attributes:
        partials: progress of its samples.
        sent_at: time of its last sending, on the loop's clock.
        reported: number of tokens reported since then.
        passed_on: whether the caller has seen a part of its stream (`openai.Stream`).
    """

    def __init__(
        self, client: DataClient, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str], timeout_s: float
    ) -> None:
        self.client = client
        self.path = path
        self.body = body
        self.headers = headers
        self.partials = Partials()
        self.sent_at = 0.0
        self.reported = 0
        self.passed_on = False
        self._timeout_s = timeout_s
        self._end = asyncio.get_running_loop().time() + timeout_s
        self._deaths = self._deaths_in_all = self._idle_aborts = 0

    async def answer(self) -> Answer:
        """Return the whole answer.

        Raises:
            DeadlineError, EngineDeadError, EngineHTTPError: as for one call, or after too many deaths of engines.
        """
        headers = {**self.headers, wire.PROGRESS_HEADER: str(self.client.stream_chunk_tokens)}
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

    def left_s(self) -> float:
        """Return the seconds that are left for the answer. DeadlineError: none are left."""
        left = self._end - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout_s:g} s", seconds=self._timeout_s)
        return left

    def sent(self, headers: Mapping[str, str]) -> Any:
        """Send the request with its samples' progress. Returns a context manager."""
        left = self.left_s()
        self.reported = 0
        self.sent_at = asyncio.get_running_loop().time()
        return self.client.http.stream("POST", self.path, self._data(), timeout_s=left, headers=headers)

    def _data(self) -> bytes:
        resume = self.partials.resume()
        if resume is None:
            return as_json(f"POST {self.path}", self.body)
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
            if self.client.unreported is None:
                self.client.http.decode(await reply.read())  # its error shows a reply that is not JSON (a proxy's page)
            return await self.client.replies_unreported().answer(self, reply)
        async with aclosing(reply.lines()) as lines:  # an iterator left to the collector costs another task
            async for line in lines:
                report: dict[str, Any] = self.client.http.decode(line)
                with reading("progress report", partial(EngineError, engine=self.client.http.name)):
                    self.reported += self.partials.add(report["samples"])
                    if "answer" in report:
                        if report["status"] >= 300:  # noqa: PLR2004 - HTTP's own boundary
                            raise self.client.http.http_error(report["status"], orjson.dumps(report["answer"]))
                        return Answer(report["answer"], report["versions"])
        raise EngineDeadError("its answer broke off", engine=self.client.http.name)

    async def after_death(self, error: EngineError) -> None:
        """Return once the request may be sent again. Raise if that cannot help."""
        if not _died(error):
            raise error
        self._deaths = 0 if self.reported else self._deaths
        self._deaths_in_all += 1
        if self._deaths == len(RETRY_S) or self._deaths_in_all == MAX_DEATHS:
            if isinstance(error, EngineHTTPError):
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
        """Prepare to send the request again. An engine or the router may hold it."""
        self.client.counters.continued += 1
        self._idle_aborts = 0 if self.reported else self._idle_aborts + 1
        self._requeue()
        if self._idle_aborts > 1:
            await asyncio.sleep(IDLE_ABORT_S)

    def _requeue(self) -> None:
        """Prepare the samples for sending. Raise if a seen stream would start over."""
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


class _Question(ResumableRequest):
    """A call whose answer has no samples."""

    async def _read(self, reply: Reply) -> Answer:
        return Answer(self.client.http.decode(await reply.read()), None)
