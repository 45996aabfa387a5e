"""The OpenAI endpoints as vLLM serves them: completions, chat completions, models, tokenize, detokenize."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

from aiohttp import web

from penstock.errors import RequestError
from penstock.sim import text
from penstock.sim.answers import (
    InvalidFieldError,
    engine_of,
    json_answer,
    json_body,
    model_asked_for,
    sampling_of,
    stream_option,
)
from penstock.sim.engine import SimEngine
from penstock.sim.events import CutError, break_connection, deltas_of, send_events
from penstock.sim.openai_shapes import ChatShape, CompletionShape, Shape
from penstock.sim.sequence import SimRequest
from penstock.sim.telling import PROGRESS_HEADER, Teller, answer, parts_of
from penstock.sim.token_routes import checked_ids, usage_of
from penstock.types import SamplingParams

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
    ids = text.encode(text.chat_prompt(_messages(body)), engine.config.vocab_size)
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
        prompt = text.chat_prompt(_messages(body))
    if not isinstance(prompt, str):
        raise InvalidFieldError("prompt", "Input should be a valid string")
    ids = text.encode(prompt, config.vocab_size)
    strings = [text.character_of(i) for i in ids] if body.get("return_token_strs") else None
    return json_answer({"count": len(ids), "max_model_len": config.max_model_len, "tokens": ids, "token_strs": strings})


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
    return json_answer({"prompt": text.decode(tokens, config.eos_token_id)})


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
    parts = [] if engine.config.plain else parts_of(shape.body.get("vllm_xargs"))
    try:
        for ids, request_id in prompts:
            submitted = await engine.submit(
                ids, params, request_id=request_id, lora=lora, max_tokens=max_tokens, parts=parts
            )
            requests.append(submitted)
        teller = Teller(requests, whole_only=_constrained(shape.body))
        if shape.body.get("stream"):
            progress = http.headers.get(PROGRESS_HEADER) == "stream"
            told = None if engine.config.plain else teller
            return await send_events(http, _chunks(engine, shape, requests), told, progress=progress)
        return await answer(http, engine, requests, teller, lambda: shape.answer(requests, _usage(requests)))
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
        chunk = shape.chunk(index, request.sequences[delta.index], delta)
        if stream_option(shape.body, "continuous_usage_stats"):
            chunk["usage"] = usage_of(len(request.prompt_ids), delta.end)
        yield chunk
    if stream_option(shape.body, "include_usage"):
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
        return [text.encode(prompt, size)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.")
    items = cast("list[Any]", prompt)
    if all(isinstance(item, str) for item in items):
        return [text.encode(item, size) for item in items]
    if all(isinstance(item, list) for item in items):
        return [checked_ids(item, f"prompt[{i}]") for i, item in enumerate(items)]
    return [checked_ids(items, "prompt")]


def _messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages: Any = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in cast("list[Any]", messages)):
        raise InvalidFieldError("messages", "Field required, a list of messages")
    return cast("list[Mapping[str, Any]]", messages)
