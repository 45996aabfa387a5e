"""Generate over HTTP, from one engine or through the router in front of many."""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.engine.partial import whole_of
from penstock.engine.request import DEAD_STATUS, RETRY_S, ClientState, Continuation, Counters
from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, RequestError
from penstock.http import MOST_DATA, HttpTransport, UnreachableError
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId
from penstock.wire import BLOCK, GENERATE, prefix_hashes

STREAM_CHUNK_TOKENS = 64
_LEAST_HASHED = 2 * BLOCK
"""Tokens: computing a shorter prompt again costs less than finding it."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
Chunk = dict[str, Any]


class DataClient:
    """Client of the generation endpoints. It sends each prompt as a request of its own, so a router can spread them.

    A request returns its whole answer even if engines release it or die under it (`engine/request.py`). A request that
    `abort_generation` ends has the finish reason `abort`.

    Args:
        url: of an engine or of the router.
        api_key: sent as a bearer token.
        request_timeout_s: deadline of one generation request, held and paused time included.
        name: names the server in errors.
        vocab_size: where known, ids outside `[0, vocab_size)` are refused before anything is sent.
        stream_chunk_tokens: an engine reports a sample's tokens in chunks of this size. An engine's death costs a
            sample at most its last chunk. 0: one report at the end.
        routed: a router may place the requests by shared prefixes. Hashing a prompt of 32k tokens takes 1 ms.

    Attributes:
        state: what its requests share. `fleet` replaces its `unreported` for vLLM without our plugin.
        kept: returns the weight versions whose update kept the KV cache.
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
        self.state = ClientState(self.http, stream_chunk_tokens)
        self.kept: Callable[[], Collection[int]] = tuple
        self._routed = routed

    @property
    def counters(self) -> Counters:
        """What the client did so that no token was lost."""
        return self.state.counters

    def expect_aborts(self) -> None:
        """Accept that requests sent so far end early: the caller is about to abort them."""
        self.state.aborted_at = asyncio.get_running_loop().time()

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2); answers in input order, `n` samples of a prompt side by side."""
        params = SamplingParams.of(batch.sampling_params)
        sessions: Sequence[SessionId | None] = [None] * len(batch) if batch.session_ids is None else batch.session_ids
        if batch.prompt_token_ids is not None:
            numbered = enumerate(batch.prompt_token_ids)
            prompts = [self._checked_ids(ids, f"prompt_token_ids[{i}]") for i, ids in numbered]
        else:
            given = () if batch.prompts is None else batch.prompts  # numpy's arrays have no truth
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
        if given.n not in {1, num_samples}:
            raise RequestError(f"num_samples is {num_samples}, and sampling parameter n is {given.n}; leave n out")
        return await self._generate(ids, replace(given, n=num_samples), session_id, adapter=adapter)

    async def completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/completions`; each prompt of the body is a request of its own (R7).

        Each choice has its `weight_versions`, `[{"version", "start", "end"}, ...]`, as vLLM's token endpoint has them.
        They are None for vLLM without our plugin, if the weights changed meanwhile or there are several choices.

        Raises:
            RequestError: the prompt has none of the four forms, or `stream` is set.
            EngineHTTPError: of the first prompt that failed; the others are cancelled.
        """
        _refuse_stream(body, "completion_stream")
        answers = (self._openai(COMPLETIONS, part, session_id) for part in split(body))
        return join(await all_or_first_error(answers))

    async def chat_completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/chat/completions`; each choice has its `weight_versions`, see `completion`."""
        _refuse_stream(body, "chat_completion_stream")
        return await self._openai(CHAT, body, session_id)

    async def completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of OpenAI `/v1/completions`, of all prompts of the body; raises as `completion`.

        The last chunk of each choice has its `weight_versions`.
        """
        n: Any = body.get("n")
        streams = [self._stream(COMPLETIONS, part, session_id) for part in split(body)]
        async for chunk in merged(streams, choices_each=n if isinstance(n, int) else 1):
            yield chunk

    async def chat_completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of OpenAI `/v1/chat/completions`; see `completion_stream`."""
        async for chunk in self._stream(CHAT, body, session_id):
            yield chunk

    async def tokenize(self, prompt: Sequence[Message] | str) -> list[int]:
        """Return the token ids of a string, or of a chat with the opening of the assistant's turn."""
        body: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        answer = await self._post_again("/tokenize", body, asyncio.get_running_loop().time() + self.request_timeout_s)
        return list(answer["tokens"])

    async def detokenize(self, token_ids: Sequence[int], *, end: float | None = None) -> str:
        """Return the text of token ids, by `end` of the loop's clock; default: within a request's deadline."""
        end = asyncio.get_running_loop().time() + self.request_timeout_s if end is None else end
        answer = await self._post_again("/detokenize", {"tokens": list(token_ids)}, end)
        return str(answer["prompt"])

    async def close(self) -> None:
        """Close the connections for good; requests in flight fail and are not sent again."""
        await self.http.end()

    async def _generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        session_id: SessionId | None,
        group_id: str | None = None,
        adapter: str | None = None,
    ) -> list[Sample]:
        self.state.unreported.check(params)
        end = asyncio.get_running_loop().time() + self.request_timeout_s
        hashes = prefix_hashes(token_ids) if self._routed and len(token_ids) >= _LEAST_HASHED else None
        headers = wire.request_headers(
            len(token_ids), params, session_id, group_id=group_id, adapter=adapter, prefix_hashes=hashes
        )
        request = self._request(GENERATE, wire.generate_body(token_ids, params, adapter=adapter), headers)
        answer = await request.answer()
        parts = [request.partials.get(i) for i in range(params.n)]
        made = [
            (self._kv_labelled(whole_of(part, params, spans)), part.stop_reason)
            for part, spans in zip(parts, wire.padded(answer.spans or (), params.n), strict=False)
        ]
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
            # vLLM's /detokenize shows special tokens; its other endpoints leave out the one that ended the text.
            ids = ids if ids[-1] in params.stop_token_ids else ids[:-1]
        text = await self.detokenize(ids, end=end) if ids else ""
        # A stop string ends with the last token, so it is the last of its kind; as in vLLM, it is no part of the text.
        return text[: text.rfind(stop)] if isinstance(stop, str) and stop in text else text

    async def _post_again(self, path: str, body: Mapping[str, Any], end: float) -> Any:
        """POST what changes nothing, and again as often as a request where its server dies."""
        for wait_s in (*RETRY_S, None):
            left = end - asyncio.get_running_loop().time()
            if left <= 0:
                raise DeadlineError(f"no time is left for {path}: request_timeout_s is over", seconds=0.0)
            try:
                return await self.http.post(path, body, timeout_s=left)
            except (EngineDeadError, EngineHTTPError) as error:
                died = isinstance(error, EngineDeadError) or error.status in DEAD_STATUS
                if wait_s is None or not died or isinstance(error, UnreachableError):
                    raise
                await asyncio.sleep(wait_s)
        raise AssertionError("the last wait is None")

    def _openai_headers(self, path: str, body: Mapping[str, Any], session_id: SessionId | None) -> dict[str, str]:
        """Return the session, and what a router can place a completion of token ids by."""
        headers = {} if session_id is None else {wire.SESSION_HEADER: str(session_id)}
        ids: Any = body.get("prompt")
        if path != COMPLETIONS or not self._routed or isinstance(ids, str) or not ids:
            return headers
        headers[wire.PROMPT_TOKENS_HEADER] = str(len(ids))
        if len(ids) >= _LEAST_HASHED and (hashes := prefix_hashes(ids)) is not None:
            headers[wire.PREFIX_HASHES_HEADER] = hashes
        limit, n = body.get("max_tokens"), body.get("n")
        if isinstance(limit, int):
            headers[wire.EXPECTED_TOKENS_HEADER] = str(limit * (n if isinstance(n, int) else 1))
        return headers

    async def _openai(self, path: str, body: Mapping[str, Any], session_id: SessionId | None) -> dict[str, Any]:
        answer = await self._request(path, body, self._openai_headers(path, body, session_id)).answer()
        choices: list[dict[str, Any]] = answer.body["choices"]
        for choice, spans in zip(choices, wire.padded(answer.spans or (), len(choices)), strict=True):
            versions = wire.as_weight_versions([(v, end - start, *notes) for v, start, end, *notes in spans])
            choice["weight_versions"] = versions if answer.spans is not None else None
        return answer.body

    def _stream(
        self, path: str, body: Mapping[str, Any], session_id: SessionId | None
    ) -> AsyncGenerator[dict[str, Any]]:
        headers = self._openai_headers(path, body, session_id)
        return self._request(path, {**body, "stream": True}, headers).chunks()

    def _request(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Continuation:
        return Continuation(self.state, path, body, headers=headers, timeout_s=self.request_timeout_s)

    def _checked_ids(self, given: Sequence[int], where: str) -> list[int]:
        """Return Python's ints, since those of numpy and torch cannot be sent."""
        try:
            ids = list(map(operator.index, given))
        except TypeError:
            raise RequestError(f"{where} must be a list of token ids, got {str(given)[:80]}") from None
        top = self.vocab_size
        for position, token in enumerate(ids):
            if token < 0 or (top is not None and token >= top):
                known = f"[0, {top})" if top is not None else "the non-negative integers"
                raise RequestError(f"{where}[{position}] is {token}, outside the vocabulary {known}")
        return ids


def _group_ids(prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """Return an id for each prompt that occurs twice or more, so that a router spreads its samples."""
    keys = [tuple(ids) for ids in prompts]
    repeated = {key: secrets.token_hex(8) for key, count in Counter(keys).items() if count > 1}
    return [repeated.get(key) for key in keys]


def _refuse_stream(body: Mapping[str, Any], instead: str) -> None:
    if body.get("stream"):
        raise RequestError(f"stream=true gives no single answer; iterate over {instead}")


# --- A completion of several prompts, as one request for each --------------------------------------------------------


def split(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one body for each prompt, in order. `n` stays: the samples of one prompt share its prefill.

    Raises:
        RequestError: the prompt has none of the four forms.
    """
    prompt: Any = body.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return [dict(body)]  # without a prompt: the engine's own error is the clearest
    if not isinstance(prompt, Sequence):
        raise RequestError(f"prompt must be {FORMS}, got {type(prompt).__name__}")
    items = cast("Sequence[Any]", prompt)
    if not items:
        raise RequestError(f"prompt is an empty list; give {FORMS}")
    if all(_is_id(item) for item in items):
        return [dict(body)]
    if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
        return [{**body, "prompt": item} for item in items]
    for i, item in enumerate(items):
        if not isinstance(item, str) and not _is_ids(item):
            raise RequestError(f"prompt[{i}] is {item!r}; prompt must be {FORMS}")
    raise RequestError(f"prompt mixes strings and token ids; it must be {FORMS}")


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    if isinstance(item, str) or not isinstance(item, Sequence):
        return False
    ids = cast("Sequence[Any]", item)
    return len(ids) > 0 and all(_is_id(i) for i in ids)


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the answers to `split` bodies: choices in order, indexed again, usage summed, the rest the first's."""
    if len(answers) == 1:
        return dict(answers[0])
    choices: list[dict[str, Any]] = []
    for answer in answers:
        part: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        first = len(choices)
        choices.extend({**choice, "index": first + i} for i, choice in enumerate(part))
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    return {**answers[0], "choices": choices, **({"usage": add_usage(usages)} if usages else {})}


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the usage of several answers."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            total[key] = add_usage(values)
        else:
            total[key] = sum(values) if values else None
    return total


async def merged(streams: Sequence[AsyncGenerator[Chunk]], *, choices_each: int) -> AsyncGenerator[Chunk]:
    """Yield chunks as they come; choices of stream `i` count from `i * choices_each`; summed usage comes last.

    The first failure of a stream ends the others and is raised. One stream passes through as it is.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield chunk
        return
    head: Chunk = {}
    usages: list[Chunk] = []
    async with aclosing(_interleaved(streams)) as items:
        async for i, chunk in items:
            head = head or {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
            choices: list[Chunk] = chunk["choices"]
            if choices:
                moved = [{**choice, "index": i * choices_each + choice["index"]} for choice in choices]
                yield {**chunk, **head, "choices": moved}
            else:
                usages.append(chunk)
    if usages:
        yield {**usages[0], **head, "usage": add_usage([chunk["usage"] for chunk in usages])}


async def _interleaved(streams: Sequence[AsyncGenerator[Chunk]]) -> AsyncGenerator[tuple[int, Chunk]]:
    next_chunks = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while next_chunks:
            done, _ = await asyncio.wait(next_chunks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                chunk, i = await task, next_chunks.pop(task)
                if chunk is not None:
                    next_chunks[asyncio.ensure_future(anext(streams[i], None))] = i
                    yield i, chunk
    finally:
        for task in next_chunks:
            task.cancel()
        await asyncio.gather(*next_chunks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
