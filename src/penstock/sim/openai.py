"""The endpoints that generate: vLLM's token endpoint and OpenAI's; models, tokenize and detokenize."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

from aiohttp import web

from penstock.errors import RequestError
from penstock.sim.engine import SimEngine
from penstock.sim.http import (
    InvalidFieldError,
    engine_of,
    json_answer,
    json_body,
    model_asked_for,
    sampling_of,
    wants_usage,
)
from penstock.sim.progress import (
    CutError,
    ProgressReporter,
    answer,
    break_connection,
    deltas_of,
    in_lines,
    parts_to_resume,
    send_events,
)
from penstock.sim.scheduler import Delta, SimRequest, SimSequence
from penstock.sim.tokens import character_of, chat_prompt, decode, encode
from penstock.types import SamplingParams
from penstock.wire import as_weight_versions

_UNUSED = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
"""Fields of vLLM's answer that the simulated engine has no use for."""


class Shape(ABC):
    """One API's answers to one HTTP request."""

    object_name = ""
    chunk_name = ""

    def __init__(self, request_id: str, model: str, eos_token_id: int, body: Mapping[str, Any]) -> None:
        self.body = body
        self._eos = eos_token_id
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}
        self._return_ids = bool(body.get("return_token_ids"))
        self._begun: set[int] = set()
        """Choices of which an event was sent."""
        self._written: dict[int, int] = {}

    def answer(self, requests: Sequence[SimRequest], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        sequences = [s for request in requests for s in request.sequences]
        choices = [self._choice(i, sequence) for i, sequence in enumerate(sequences)]
        rest = dict.fromkeys(_UNUSED)
        return {**self._head, "object": self.object_name, "choices": choices, "usage": usage, **rest}

    def chunk_head(self) -> dict[str, Any]:
        """What every event holds."""
        return {**self._head, "object": self.chunk_name}

    def chunk(self, index: int, sequence: SimSequence, delta: Delta) -> dict[str, Any]:
        """The event for new tokens of choice `index`."""
        choice = {
            "index": index,
            **self._content(self._new_text(index, sequence, delta), whole=False),
            "logprobs": self._logprobs(sequence, delta.start, delta.end),
            "finish_reason": sequence.finish_reason if delta.finished else None,
            "stop_reason": sequence.stop_reason if delta.finished else None,
        }
        if self._return_ids:
            choice["token_ids"] = sequence.output[delta.start : delta.end]
        return {**self.chunk_head(), "choices": [choice]}

    def opening(self, requests: Sequence[SimRequest]) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        del requests
        return iter(())

    def _choice(self, index: int, sequence: SimSequence) -> dict[str, Any]:
        return {
            "index": index,
            **self._content(sequence.text, whole=True),
            "logprobs": self._logprobs(sequence, 0, len(sequence.output)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output if self._return_ids else None,
            "routed_experts": None,
        }

    @abstractmethod
    def _content(self, text: str, *, whole: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None: ...

    def _new_text(self, index: int, sequence: SimSequence, delta: Delta) -> str:
        stops = sequence.request.params.stop
        if not stops:
            stopped_by_token = delta.finished and isinstance(sequence.stop_reason, int)
            return decode(sequence.output[delta.start : delta.end - stopped_by_token], self._eos)
        start = self._written.get(index, 0)
        if delta.finished:
            whole = sequence.text
        else:
            # vLLM too holds back what might be the beginning of a stop string.
            whole = decode(sequence.output[: delta.end], self._eos)
            whole = whole[: max(start, len(whole) - max(map(len, stops)) + 1)]
        self._written[index] = len(whole)
        return whole[start:]


class CompletionShape(Shape):
    """`/v1/completions`."""

    object_name = chunk_name = "text_completion"

    def chunk(self, index: int, sequence: SimSequence, delta: Delta) -> dict[str, Any]:
        """The first event of a choice has the prompt's ids."""
        chunk = super().chunk(index, sequence, delta)
        if self._return_ids and index not in self._begun:
            self._begun.add(index)
            chunk["choices"][0]["prompt_token_ids"] = sequence.request.prompt_ids
        return chunk

    def _choice(self, index: int, sequence: SimSequence) -> dict[str, Any]:
        prompt_ids = sequence.request.prompt_ids if self._return_ids else None
        return {**super()._choice(index, sequence), "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        del whole
        return {"text": text}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None:
        if not sequence.request.params.logprobs:
            return None
        as_ids = self.body.get("return_tokens_as_token_ids")
        ids, logprobs = sequence.output[start:end], sequence.logprobs[start:end]
        tokens = [f"token_id:{i}" if as_ids else character_of(i) for i in ids]
        return {
            "text_offset": list(range(start, end)),
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        }


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def answer(self, requests: Sequence[SimRequest], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt's ids come once, in completions in each choice."""
        prompt_ids = requests[0].prompt_ids if self._return_ids else None
        return {**super().answer(requests, usage), "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def opening(self, requests: Sequence[SimRequest]) -> Iterator[dict[str, Any]]:
        """Each choice's role comes first, with the prompt's ids."""
        for sequence in requests[0].sequences:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": requests[0].prompt_ids} if self._return_ids else {}
            yield {**self.chunk_head(), "choices": [choice], **ids}

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None, "reasoning": None}}
        return {"delta": {"content": text}}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None:
        if not sequence.request.params.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True):
            token = character_of(token_id)
            entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
            content.append({**entry, "top_logprobs": [entry] if self.body.get("top_logprobs") else []})
        return {"content": content}


_TOKENS_UNUSED = (
    "prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip


async def generate(http: web.Request) -> web.StreamResponse:
    """`POST /inference/v1/generate`."""
    engine = engine_of(http)
    body = await json_body(http)
    name, lora = model_asked_for(engine, body)
    token_ids = checked_ids(body.get("token_ids"), "token_ids")
    sampling: Any = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise InvalidFieldError("sampling_params", "Field required, an object of sampling parameters")
    given = cast("dict[str, Any]", sampling)
    with_logprobs = given.get("logprobs") is not None
    room = engine.config.max_model_len
    params = sampling_of(given, logprobs=with_logprobs, detokenize=False, default_max_tokens=room)
    request_id = http.headers.get("X-Request-Id") or str(body.get("request_id") or uuid4().hex)
    request = await engine.submit(
        token_ids,
        params,
        request_id=f"generate-tokens-{request_id}",
        lora=lora,
        max_tokens=room if given.get("max_tokens") is None else None,
        parts=parts_to_resume(given.get("extra_args"), params, engine.config),
    )
    try:
        reporter = ProgressReporter([request], whole_only=given.get("structured_outputs") is not None)
        if body.get("stream"):
            reports = None if engine.config.plain else reporter
            return await send_events(http, _tokens_chunks(engine, request, body), reports)
        return await answer(http, engine, [request], reporter, lambda: _tokens_answer(http, request, name, body))
    except CutError:
        break_connection(http)
        return web.Response()
    finally:
        engine.drop(request)


def checked_ids(value: Any, name: str) -> list[int]:
    """A list of token ids. Raises RequestError where it is none."""
    if not isinstance(value, list) or not value:
        raise InvalidFieldError(name, "List should have at least 1 item of token ids")
    ids = cast("list[Any]", value)
    if any(type(i) is not int for i in ids):
        raise InvalidFieldError(name, "Input should be a valid integer")
    return ids


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Make the UsageInfo of vLLM."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _tokens_answer(http: web.Request, request: SimRequest, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    engine = engine_of(http)
    lengths = [0 if in_lines(http, engine) else len(s.output) for s in request.sequences]  # lines tell every token
    choices = [_tokens_choice(s, 0, length) for s, length in zip(request.sequences, lengths, strict=True)]
    if engine.config.keeps_versions:
        for choice, sequence in zip(choices, request.sequences, strict=True):
            choice["weight_versions"] = as_weight_versions(sequence.versions)
    return {
        "request_id": request.id,
        "model": model,
        "created": int(time.time()),
        "usage": usage_of(len(request.prompt_ids), sum(lengths)),
        "prompt_logprobs": None,
        "prompt_token_ids": request.prompt_ids if body.get("return_token_ids") else None,
        **dict.fromkeys(_TOKENS_UNUSED),
        "output_mode": "tokens",
        "choices": choices,
    }


async def _tokens_chunks(
    engine: SimEngine, request: SimRequest, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    first = bool(body.get("return_token_ids"))
    async for _, delta in deltas_of(engine, [request]):
        sequence = request.sequences[delta.index]
        choice = _tokens_choice(sequence, delta.start, delta.end)
        if not delta.finished:
            choice |= {"finish_reason": None, "stop_reason": None}
        # The spans come once, at the end, and cover the whole output.
        if engine.config.keeps_versions:
            choice["weight_versions"] = as_weight_versions(sequence.versions) if delta.finished else None
        chunk: dict[str, Any] = {"request_id": request.id, "usage": None, "output_mode": "tokens", "choices": [choice]}
        if first:
            chunk["prompt_token_ids"], first = request.prompt_ids, False
        yield chunk
    if wants_usage(body):
        made = sum(len(s.output) for s in request.sequences)
        usage = usage_of(len(request.prompt_ids), made)
        yield {"request_id": request.id, "output_mode": "tokens", "choices": [], "usage": usage}


def _tokens_choice(sequence: SimSequence, start: int, end: int) -> dict[str, Any]:
    logprobs = None
    if sequence.request.params.logprobs:
        pairs = zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True)
        logprobs = {"content": [_token_logprob(token, logprob) for token, logprob in pairs]}
    return {
        "index": sequence.index,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.output[start:end],
        "routed_experts": None,
        "sampling_mask": None,
    }


def _token_logprob(token_id: int, logprob: float) -> dict[str, Any]:
    # vLLM's top_logprobs always holds the sampled token; the simulated model has no other candidates.
    entry = {"token_id": token_id, "logprob": logprob, "rank": 1}
    return {**entry, "top_logprobs": [entry]}


COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for completions, which vLLM keeps; chats get what the context leaves."""


async def completions(http: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`."""
    engine = engine_of(http)
    body = await json_body(http)
    name, lora = model_asked_for(engine, body)
    with_logprobs = body.get("logprobs") is not None
    params = sampling_of(body, logprobs=with_logprobs, detokenize=True, default_max_tokens=COMPLETIONS_MAX_TOKENS)
    prompts = _prompts(engine, body.get("prompt"))
    request_id = f"cmpl-{http.headers.get('X-Request-Id') or body.get('request_id') or uuid4().hex}"
    shape = CompletionShape(request_id, name, engine.config.eos_token_id, body)
    return await _serve(http, shape, [(ids, f"{request_id}-{i}") for i, ids in enumerate(prompts)], params, lora, None)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    engine = engine_of(http)
    body = await json_body(http)
    name, lora = model_asked_for(engine, body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    given = {**body, "max_tokens": limit}
    params = sampling_of(
        given, logprobs=bool(body.get("logprobs")), detokenize=True, default_max_tokens=engine.config.max_model_len
    )
    ids = encode(chat_prompt(_messages(body)), engine.config.vocab_size)
    request_id = f"chatcmpl-{http.headers.get('X-Request-Id') or body.get('request_id') or uuid4().hex}"
    shape = ChatShape(request_id, name, engine.config.eos_token_id, body)
    unlimited = engine.config.max_model_len if limit is None else None
    return await _serve(http, shape, [(ids, request_id)], params, lora, unlimited)


async def models(http: web.Request) -> web.Response:
    """`GET /v1/models`."""
    config = engine_of(http).config
    now = int(time.time())
    base = {"object": "model", "created": now, "owned_by": "vllm"}
    served = config.served_model_name
    data: list[dict[str, Any]] = [
        {"id": served, **base, "root": served, "parent": None, "max_model_len": config.max_model_len, "permission": []}
    ]
    for name, path in engine_of(http).adapters.loaded.items():
        data.append({"id": name, **base, "root": path, "parent": served, "max_model_len": None, "permission": []})
    return json_answer({"object": "list", "data": data})


async def tokenize(http: web.Request) -> web.Response:
    """`POST /tokenize`, of a prompt or of messages."""
    config = engine_of(http).config
    body = await json_body(http)
    model_asked_for(engine_of(http), body)
    prompt = body.get("prompt")
    if prompt is None:
        prompt = chat_prompt(_messages(body))
    if not isinstance(prompt, str):
        raise InvalidFieldError("prompt", "Input should be a valid string")
    ids = encode(prompt, config.vocab_size)
    return json_answer({"count": len(ids), "max_model_len": config.max_model_len, "tokens": ids, "token_strs": None})


async def detokenize(http: web.Request) -> web.Response:
    """`POST /detokenize`."""
    config = engine_of(http).config
    body = await json_body(http)
    ids: Any = body.get("tokens")
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in cast("list[Any]", ids)):
        raise InvalidFieldError("tokens", "Input should be a list of token ids")
    tokens = cast("list[int]", ids)
    if outside := [i for i in tokens if i >= config.vocab_size]:
        raise RequestError(f"Token id {max(outside)} is out of vocabulary")
    return json_answer({"prompt": decode(tokens, config.eos_token_id)})


async def _serve(
    http: web.Request,
    shape: Shape,
    prompts: Sequence[tuple[Sequence[int], str]],
    params: SamplingParams,
    lora: str | None,
    max_tokens: int | None,
) -> web.StreamResponse:
    engine = engine_of(http)
    requests: list[SimRequest] = []
    parts = parts_to_resume(shape.body.get("vllm_xargs"), params, engine.config)
    try:
        for ids, request_id in prompts:
            submitted = await engine.submit(
                ids, params, request_id=request_id, lora=lora, max_tokens=max_tokens, parts=parts
            )
            requests.append(submitted)
        reporter = ProgressReporter(requests, whole_only=_constrained(shape.body))
        if shape.body.get("stream"):
            reports = None if engine.config.plain else reporter
            return await send_events(http, _chunks(engine, shape, requests), reports)
        return await answer(http, engine, requests, reporter, lambda: shape.answer(requests, _usage(requests)))
    except CutError:
        break_connection(http)
        return web.Response()
    finally:
        for request in requests:
            engine.drop(request)


async def _chunks(engine: SimEngine, shape: Shape, requests: Sequence[SimRequest]) -> AsyncIterator[Mapping[str, Any]]:
    for chunk in shape.opening(requests):
        yield chunk
    async for i, delta in deltas_of(engine, requests):
        request = requests[i]
        index = i * request.params.n + delta.index
        yield shape.chunk(index, request.sequences[delta.index], delta)
    if wants_usage(shape.body):
        yield {**shape.chunk_head(), "choices": [], "usage": _usage(requests)}


def _constrained(body: Mapping[str, Any]) -> bool:
    """It asks for what vLLM makes under a grammar; the simulated engine has none, and says so of the rest."""
    wanted: Any = body.get("response_format")
    typed = isinstance(wanted, dict) and cast("dict[str, Any]", wanted).get("type", "text") != "text"
    return typed or body.get("structured_outputs") is not None


def _usage(requests: Sequence[SimRequest]) -> dict[str, Any]:
    made = sum(len(s.output) for request in requests for s in request.sequences)
    return usage_of(sum(len(request.prompt_ids) for request in requests), made)


def _prompts(engine: SimEngine, prompt: Any) -> list[list[int]]:
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    size = engine.config.vocab_size
    if isinstance(prompt, str):
        return [encode(prompt, size)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.")
    items = cast("list[Any]", prompt)
    if all(isinstance(item, str) for item in items):
        return [encode(item, size) for item in items]
    if all(isinstance(item, list) for item in items):
        return [checked_ids(item, f"prompt[{i}]") for i, item in enumerate(items)]
    return [checked_ids(items, "prompt")]


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages: Any = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in cast("list[Any]", messages)):
        raise InvalidFieldError("messages", "Field required, a list of messages")
    return cast("list[Mapping[str, Any]]", messages)
