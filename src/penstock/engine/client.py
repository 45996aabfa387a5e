"""Generate over HTTP, from one engine or through the router in front of many."""

from __future__ import annotations

import asyncio
import operator
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from penstock import wire
from penstock.aio import all_or_first_error
from penstock.engine.request import DEAD_STATUS, RETRY_S, ClientState, Continuation, Counters, whole_of
from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, RequestError
from penstock.http import MOST_DATA, HttpTransport, UnreachableError
from penstock.rooms import plugged_in
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId
from penstock.wire import BLOCK, GENERATE, prefix_hashes

STREAM_CHUNK_TOKENS = 64
LEAST_HASHED = 2 * BLOCK
"""Tokens: computing a shorter prompt again costs less than finding it."""


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
        self.routed = routed

    @cached_property
    def _openai(self) -> Any:
        return plugged_in("openai")(self)

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

    def completion(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Call OpenAI's `/v1/completions`; see `openai.OpenAICalls.completion`."""
        return self._openai.completion(body, session_id)

    def chat_completion(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> Coroutine[Any, Any, dict[str, Any]]:
        """Call OpenAI's `/v1/chat/completions`; see `openai.OpenAICalls`."""
        return self._openai.chat_completion(body, session_id)

    def completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of OpenAI's `/v1/completions`; see `openai.OpenAICalls`."""
        return self._openai.completion_stream(body, session_id)

    def chat_completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of OpenAI's `/v1/chat/completions`; see `openai.OpenAICalls`."""
        return self._openai.chat_completion_stream(body, session_id)

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
        hashes = prefix_hashes(token_ids) if self.routed and len(token_ids) >= LEAST_HASHED else None
        headers = wire.request_headers(
            len(token_ids), params, session_id, group_id=group_id, adapter=adapter, prefix_hashes=hashes
        )
        body = wire.generate_body(token_ids, params, adapter=adapter)
        request = Continuation(self.state, GENERATE, body, headers=headers, timeout_s=self.request_timeout_s)
        answer = await request.answer()
        parts = [request.partials.get(i) for i in range(params.n)]
        made = [
            (self._kv_labelled(whole_of(part, params, spans)), part.stop_reason)
            for part, spans in zip(parts, wire.padded(answer.spans or (), params.n), strict=False)
        ]
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
