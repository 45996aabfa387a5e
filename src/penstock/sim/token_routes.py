"""`POST /inference/v1/generate`: tokens in, tokens out, in the form of vLLM 0.32."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast
from uuid import uuid4

from aiohttp import web

from penstock.sim.answers import (
    InvalidFieldError,
    engine_of,
    json_body,
    model_asked_for,
    sampling_of,
    stream_option,
)
from penstock.sim.engine import SimEngine
from penstock.sim.events import CutError, break_connection, deltas_of, send_events
from penstock.sim.sequence import SimRequest, SimSequence
from penstock.sim.telling import PROGRESS_HEADER, Teller, answer, in_lines, parts_of
from penstock.types import VersionSpan

_UNUSED = (
    "prompt_token_id_logprobs", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip
"""Fields of vLLM's answer that the simulated engine has no use for."""


async def generate(http: web.Request) -> web.StreamResponse:
    """VLLM's ServingTokens."""
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
        parts=[] if engine.config.plain else parts_of(given.get("extra_args")),
    )
    try:
        teller = Teller([request])
        if body.get("stream"):
            progress = http.headers.get(PROGRESS_HEADER) == "stream"
            told = None if engine.config.plain else teller
            return await send_events(http, _chunks(engine, request, body), told, progress=progress)
        return await answer(http, engine, [request], teller, lambda: _answer(http, request, name, body))
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
    """VLLM's UsageInfo."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _answer(http: web.Request, request: SimRequest, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    engine = engine_of(http)
    lengths = [0 if in_lines(http, engine) else len(s.output) for s in request.sequences]  # lines tell every token
    choices = [_choice(s, 0, length) for s, length in zip(request.sequences, lengths, strict=True)]
    if engine.config.keeps_versions:
        for choice, sequence in zip(choices, request.sequences, strict=True):
            choice["weight_versions"] = _weight_versions(sequence)
    return {
        "request_id": request.id,
        "model": model,
        "created": int(time.time()),
        "usage": usage_of(len(request.prompt_ids), sum(lengths)),
        "prompt_logprobs": None,
        "prompt_token_ids": request.prompt_ids if body.get("return_token_ids") else None,
        **dict.fromkeys(_UNUSED),
        "output_mode": "tokens",
        "choices": choices,
    }


async def _chunks(engine: SimEngine, request: SimRequest, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
    first = bool(body.get("return_token_ids"))
    async for _, delta in deltas_of(engine, [request]):
        sequence = request.sequences[delta.index]
        choice = _choice(sequence, delta.start, delta.end)
        if not delta.finished:
            choice |= {"finish_reason": None, "stop_reason": None}
        # The spans come once, at the end, and cover the whole output.
        if engine.config.keeps_versions:
            choice["weight_versions"] = _weight_versions(sequence) if delta.finished else None
        chunk: dict[str, Any] = {"request_id": request.id, "usage": None, "output_mode": "tokens", "choices": [choice]}
        if first:
            chunk["prompt_token_ids"], first = request.prompt_ids, False
        if stream_option(body, "continuous_usage_stats"):
            chunk["usage"] = usage_of(len(request.prompt_ids), delta.end)
        yield chunk
    if stream_option(body, "include_usage"):
        made = sum(len(s.output) for s in request.sequences)
        usage = usage_of(len(request.prompt_ids), made)
        yield {"request_id": request.id, "output_mode": "tokens", "choices": [], "usage": usage}


def _choice(sequence: SimSequence, start: int, end: int) -> dict[str, Any]:
    logprobs = None
    if sequence.request.params.logprobs:
        pairs = zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True)
        logprobs = {"content": [_logprob(token, logprob) for token, logprob in pairs]}
    return {
        "index": sequence.index,
        "logprobs": logprobs,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
        "token_ids": sequence.output[start:end],
        "routed_experts": None,
        "sampling_mask": None,
    }


def _logprob(token_id: int, logprob: float) -> dict[str, Any]:
    # vLLM's top_logprobs always holds the sampled token; the simulated model has no other candidates.
    entry = {"token_id": token_id, "logprob": logprob, "rank": 1}
    return {**entry, "top_logprobs": [entry]}


def _weight_versions(sequence: SimSequence) -> list[dict[str, Any]]:
    pairs: list[tuple[VersionSpan, str]] = list(zip(sequence.spans, sequence.labels, strict=True))
    return [{"version": label, "start": span.start, "end": span.end} for span, label in pairs]
