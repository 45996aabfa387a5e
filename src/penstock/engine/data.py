"""The data plane's client: prompts in, samples out, against one engine or the router in front of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from penstock.engine import wire
from penstock.engine.concurrent import all_or_first_error
from penstock.engine.transport import HttpTransport
from penstock.errors import RequestError
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId

TOKENIZE_S = 60.0
"""Deadline of /tokenize and /detokenize. They do no model work, but share the server with requests that do."""


class DataClient:
    """Generation over HTTP. One request for each prompt, so that a router can spread a batch.

    Args:
        url: of an engine or of the router.
        api_key: sent as a bearer token.
        request_timeout_s: deadline of one generation request, held and paused time included.
        name: names the server in errors.
        vocab_size: where known, ids outside `[0, vocab_size)` are refused before anything is sent.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        request_timeout_s: float = 3600.0,
        name: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.http = HttpTransport(url, api_key=api_key, name=name)
        self.vocab_size = vocab_size
        self.request_timeout_s = request_timeout_s

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2); answers in input order, `n` samples of a prompt side by side."""
        params = SamplingParams.of(batch.sampling_params)
        sessions: Sequence[SessionId | None] = batch.session_ids or [None] * len(batch)
        if batch.prompt_token_ids is not None:
            prompts = batch.prompt_token_ids
            for i, ids in enumerate(prompts):
                self._check_ids(ids, f"prompt_token_ids[{i}]")
        else:
            prompts = await all_or_first_error(self.tokenize(prompt) for prompt in batch.prompts or ())
        groups = await all_or_first_error(
            self._generate(ids, params, session) for ids, session in zip(prompts, sessions, strict=True)
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
        if not prompt_token_ids:
            raise RequestError("prompt_token_ids is empty")
        self._check_ids(prompt_token_ids, "prompt_token_ids")
        params = replace(SamplingParams.of(sampling_params), n=num_samples)
        return await self._generate(prompt_token_ids, params, session_id)

    async def completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/completions`, the whole body to one engine."""
        return await self._openai("/v1/completions", body, session_id)

    async def chat_completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/chat/completions`."""
        return await self._openai("/v1/chat/completions", body, session_id)

    async def tokenize(self, prompt: Sequence[Message] | str) -> list[int]:
        """Token ids of a plain string, or of a chat with the template's opening of the assistant's turn."""
        body: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        answer = await self.http.post("/tokenize", body, timeout_s=TOKENIZE_S)
        return list(answer["tokens"])

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        answer = await self.http.post("/detokenize", {"tokens": list(token_ids)}, timeout_s=TOKENIZE_S)
        return str(answer["prompt"])

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

    async def _generate(
        self, token_ids: Sequence[int], params: SamplingParams, session_id: SessionId | None
    ) -> list[Sample]:
        body = orjson.dumps(wire.generate_body(token_ids, params))
        headers = wire.request_headers(len(token_ids), params, session_id)
        answer, answered = await self.http.call(
            "POST", "/inference/v1/generate", body, timeout_s=self.request_timeout_s, headers=headers
        )
        samples = wire.samples_of(self.http.decode(answer), answered, params)
        if not params.detokenize:
            return samples
        texts = await all_or_first_error(self._text(sample, params) for sample in samples)
        return [replace(sample, text=text) for sample, text in zip(samples, texts, strict=True)]

    async def _text(self, sample: Sample, params: SamplingParams) -> str:
        ids = sample.token_ids
        if ids and params.skip_special_tokens and sample.finish_reason == "stop" and not params.stop:
            # vLLM's /detokenize shows special tokens. Without stop strings, what ended the sample is its last token.
            ids = ids if ids[-1] in params.stop_token_ids else ids[:-1]
        return await self.detokenize(ids) if ids else ""

    async def _openai(self, path: str, body: Mapping[str, Any], session_id: SessionId | None) -> dict[str, Any]:
        if body.get("stream"):
            raise RequestError("stream=true gives no single answer; stream from the HTTP endpoint itself")
        headers = {wire.SESSION_HEADER: str(session_id)} if session_id is not None else None
        answer: dict[str, Any] = await self.http.post(path, body, timeout_s=self.request_timeout_s, headers=headers)
        return answer

    def _check_ids(self, ids: Sequence[int], where: str) -> None:
        top = self.vocab_size
        for position, token in enumerate(ids):
            if token < 0 or (top is not None and token >= top):
                known = f"[0, {top})" if top is not None else "the non-negative integers"
                raise RequestError(f"{where}[{position}] is {token}, outside the vocabulary {known}")
