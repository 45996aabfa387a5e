"""Many coroutines at once, where the first failure cancels the others and is raised as it is; work in a thread."""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

from penstock import wire
from penstock.engine.partial import whole_of
from penstock.engine.request import DEAD_STATUS, RETRY_S, ClientState, Continuation, Counters
from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, RequestError
from penstock.http import HttpTransport, UnreachableError
from penstock.parsing import MOST_DATA
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId
from penstock.wire import BLOCK, GENERATE, prefix_hashes

T = TypeVar("T")


async def all_or_first_error(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. Nothing is left running when this returns or raises."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread; a cancellation takes effect when it has ended, since until then it uses what is ours."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait((thread,))
        raise


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task, wait until it has ended, and raise what broke it before that, if something did."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
Chunk = dict[str, Any]
Item = tuple[int, Chunk | BaseException | None]


def split(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One body for each prompt, in order. `n` stays: the samples of one prompt share its prefill.

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


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer of the parts' answers: choices in the order of the prompts and indexed anew, usage summed.

    The other fields are the first answer's. A single answer comes back as it is.
    """
    if len(answers) == 1:
        return dict(answers[0])
    choices: list[dict[str, Any]] = []
    for answer in answers:
        part: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        first = len(choices)
        choices.extend({**choice, "index": first + i} for i, choice in enumerate(part))
    joined = {**answers[0], "choices": choices}
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    if usages:
        joined["usage"] = add_usage(usages)
    return joined


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Usage of several answers together."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            total[key] = add_usage(values)
        else:
            total[key] = sum(values) if values else None
    return total


async def merged(streams: Sequence[AsyncGenerator[Chunk]], *, choices_each: int) -> AsyncGenerator[Chunk]:
    """Chunks as they come, the choices of stream `i` indexed from `i * choices_each`; usage summed, once, at the end.

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
    queue: asyncio.Queue[Item] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_read(i, stream, queue)) for i, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            i, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(i: int, stream: AsyncGenerator[Chunk], queue: asyncio.Queue[Item]) -> None:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                await queue.put((i, chunk))
    except Exception as error:  # noqa: BLE001 - raised where the chunks are read
        await queue.put((i, error))
    else:
        await queue.put((i, None))


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    if isinstance(item, str) or not isinstance(item, Sequence):
        return False
    ids = cast("Sequence[Any]", item)
    return len(ids) > 0 and all(_is_id(i) for i in ids)


STREAM_CHUNK_TOKENS = 64
_LEAST_HASHED = 2 * BLOCK
"""Tokens: a shorter prompt is computed anew sooner than it is found."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class DataClient:
    """Generation over HTTP. One request for each prompt, so that a router can spread a batch.

    Every request ends with its whole answer, also where engines release it or die under it (`continuation.py`). One
    that `abort_generation` ends has the finish reason `abort`.

    Args:
        url: of an engine or of the router.
        api_key: sent as a bearer token.
        request_timeout_s: deadline of one generation request, held and paused time included.
        name: names the server in errors.
        vocab_size: where known, ids outside `[0, vocab_size)` are refused before anything is sent.
        stream_chunk_tokens: a sample's tokens come in chunks of so many, so that the death of an engine costs at most
            the last chunk; 0: all at the end.
        routed: a router is there, or may be, that places by what prompts have in common; it costs a millisecond for
            a prompt of 32k tokens.

    Attributes:
        state: what its requests share; its `unreported` is replaced where engines may have no plugin of ours.
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
        """Weight versions that were put in force with the KV cache kept."""
        self._routed = routed

    @property
    def counters(self) -> Counters:
        """What it had to do so that nothing was lost."""
        return self.state.counters

    def expect_aborts(self) -> None:
        """Let all requests sent so far end with what they have, as the caller is about to ask of the engines."""
        self.state.aborted_at = asyncio.get_running_loop().time()

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2); answers in input order, `n` samples of a prompt side by side."""
        params = SamplingParams.of(batch.sampling_params)
        sessions: Sequence[SessionId | None] = [None] * len(batch) if batch.session_ids is None else batch.session_ids
        if batch.prompt_token_ids is not None:
            given = enumerate(batch.prompt_token_ids)
            prompts = [self._checked_ids(ids, f"prompt_token_ids[{i}]") for i, ids in given]
        else:
            prompts = await all_or_first_error(
                self.tokenize(prompt) for prompt in (() if batch.prompts is None else batch.prompts)
            )
            if [] in prompts:
                raise RequestError(f"prompts[{prompts.index([])}] has no token; give at least one")
        groups = await all_or_first_error(
            self._generate(ids, params, session, group)
            for ids, session, group in zip(prompts, sessions, _groups(prompts), strict=True)
        )
        return GenerateOutput.of([sample for group in groups for sample in group])

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
    ) -> list[Sample]:
        """`num_samples` samples of one prompt as one n-way request (R3)."""
        ids = self._checked_ids(prompt_token_ids, "prompt_token_ids")
        if not ids:
            raise RequestError("prompt_token_ids is empty")
        given = SamplingParams.of(sampling_params)
        if given.n not in {1, num_samples}:
            raise RequestError(f"num_samples is {num_samples}, and sampling parameter n is {given.n}; leave n out")
        params = replace(given, n=num_samples)
        return await self._generate(ids, params, session_id)

    async def completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/completions`; each prompt of the body is a request of its own (R7).

        Each choice has its `weight_versions`, `[{"version", "start", "end"}, ...]`, as vLLM's token endpoint has them;
        of an engine without our plugin None, where weights changed meanwhile or the request has several choices.

        Raises:
            RequestError: the prompt has none of the four forms, or `stream` is set.
            EngineHTTPError: of the first prompt that failed; the others are cancelled.
        """
        _refuse_stream(body, "completion_stream")
        parts = split(body)
        answers = (self._openai(COMPLETIONS, part, session_id, self._hints(part)) for part in parts)
        return join(await all_or_first_error(answers))

    async def chat_completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/chat/completions`; each choice has its `weight_versions`, see `completion`."""
        _refuse_stream(body, "chat_completion_stream")
        return await self._openai(CHAT, body, session_id)

    async def completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of OpenAI `/v1/completions` with `stream`, of all prompts of the body; raises as `completion`.

        The last chunk of each choice has its `weight_versions`.
        """
        n: Any = body.get("n")
        streams = [self._stream(COMPLETIONS, part, session_id, self._hints(part)) for part in split(body)]
        async for chunk in merged(streams, choices_each=n if isinstance(n, int) else 1):
            yield chunk

    async def chat_completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of OpenAI `/v1/chat/completions` with `stream`; see `completion_stream`."""
        async for chunk in self._stream(CHAT, body, session_id):
            yield chunk

    async def tokenize(self, prompt: Sequence[Message] | str) -> list[int]:
        """Token ids of a plain string, or of a chat with the template's opening of the assistant's turn."""
        body: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        answer = await self._asked("/tokenize", body, asyncio.get_running_loop().time() + self.request_timeout_s)
        return list(answer["tokens"])

    async def detokenize(self, token_ids: Sequence[int], *, end: float | None = None) -> str:
        """Text of token ids, by `end` (of the loop's clock); default: within the deadline of a request."""
        end = asyncio.get_running_loop().time() + self.request_timeout_s if end is None else end
        answer = await self._asked("/detokenize", {"tokens": list(token_ids)}, end)
        return str(answer["prompt"])

    async def close(self) -> None:
        """Close the connections for good; requests in flight fail and are not sent again."""
        await self.http.end()

    def _kv_labelled(self, sample: Sample) -> Sample:
        kept = self.kept()
        if not any(span.version in kept for span in sample.spans):
            return sample
        return replace(sample, spans=tuple(replace(s, kv_kept=s.version in kept) for s in sample.spans))

    async def _generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        session_id: SessionId | None,
        group_id: str | None = None,
    ) -> list[Sample]:
        self.state.unreported.check(params)
        end = asyncio.get_running_loop().time() + self.request_timeout_s
        hashes = prefix_hashes(token_ids) if self._routed and len(token_ids) >= _LEAST_HASHED else None
        headers = wire.request_headers(len(token_ids), params, session_id, group_id=group_id, prefix_hashes=hashes)
        request = self._request(GENERATE, wire.generate_body(token_ids, params), headers)
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

    async def _text(self, sample: Sample, params: SamplingParams, stop: int | str | None, end: float) -> str:
        ids = sample.token_ids
        ended_by_token = sample.finish_reason == "stop" and not isinstance(stop, str)
        if ids and params.skip_special_tokens and ended_by_token:
            # vLLM's /detokenize shows special tokens; its other endpoints leave out the one that ended the text.
            ids = ids if ids[-1] in params.stop_token_ids else ids[:-1]
        text = await self.detokenize(ids, end=end) if ids else ""
        # A stop string ends with the last token, so it is the last of its kind; as in vLLM, it is no part of the text.
        return text[: text.rfind(stop)] if isinstance(stop, str) and stop in text else text

    async def _asked(self, path: str, body: Mapping[str, Any], end: float) -> Any:
        """The answer to what needs no model. The router holds it as long as any request, and tokens wait for it.

        It changes nothing, so where its server dies it is asked again, as often as a request.
        """
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

    def _hints(self, body: Mapping[str, Any]) -> dict[str, str]:
        """What a router can place a completion of token ids by."""
        ids: Any = body.get("prompt")
        if not self._routed or isinstance(ids, str) or not ids:
            return {}
        hints = {wire.PROMPT_TOKENS_HEADER: str(len(ids))}
        if len(ids) >= _LEAST_HASHED and (hashes := prefix_hashes(ids)) is not None:
            hints[wire.PREFIX_HASHES_HEADER] = hashes
        limit, n = body.get("max_tokens"), body.get("n")
        if isinstance(limit, int):
            hints[wire.EXPECTED_TOKENS_HEADER] = str(limit * (n if isinstance(n, int) else 1))
        return hints

    async def _openai(
        self,
        path: str,
        body: Mapping[str, Any],
        session_id: SessionId | None,
        hints: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        answer = await self._request(path, body, {**(hints or {}), **_session(session_id)}).answer()
        whole: dict[str, Any] = answer.body
        choices: list[dict[str, Any]] = whole["choices"]
        for choice, its in zip(choices, wire.padded(answer.spans or (), len(choices)), strict=True):
            versions = wire.as_weight_versions([(v, end - start) for v, start, end in its])
            choice["weight_versions"] = versions if answer.spans is not None else None
        return whole

    def _stream(
        self,
        path: str,
        body: Mapping[str, Any],
        session_id: SessionId | None,
        hints: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        headers = {**(hints or {}), **_session(session_id)}
        return self._request(path, {**body, "stream": True}, headers).chunks()

    def _request(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Continuation:
        return Continuation(self.state, path, body, headers=headers, timeout_s=self.request_timeout_s)

    def _checked_ids(self, given: Sequence[int], where: str) -> list[int]:
        """As Python's ints: those of numpy and torch cannot be sent."""
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


def _groups(prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """An id for each prompt that occurs more than once, so that a router spreads its samples; None for the others."""
    keys = [tuple(ids) for ids in prompts]
    repeated = {key: secrets.token_hex(8) for key, count in Counter(keys).items() if count > 1}
    return [repeated.get(key) for key in keys]


def _session(session_id: SessionId | None) -> dict[str, str]:
    return {wire.SESSION_HEADER: str(session_id)} if session_id is not None else {}


def _refuse_stream(body: Mapping[str, Any], instead: str) -> None:
    if body.get("stream"):
        raise RequestError(f"stream=true gives no single answer; iterate over {instead}")
