"""The generating endpoints (vLLM's token endpoint and OpenAI's), and models, tokenize and detokenize.

Events omit the prompt's ids. Whole answers include them.
"""

from __future__ import annotations

import reprlib
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from penstock.errors import RequestError
from penstock.sim.call import Call, Generation
from penstock.sim.scheduler import Delta, SimSequence
from penstock.sim.tokens import character_of, chat_prompt, decode, encode
from penstock.types import SamplingParams
from penstock.wire import as_weight_versions

COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for completions, which vLLM keeps. The default for chats is the rest of the context."""
_UNUSED = ("kv_transfer_params", "ec_transfer_params", "metrics")
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Sampling(BaseModel):
    """Sampling parameters, parsed like vLLM: "2" and 2.0 are integers, 1 is true. Unknown ones are ignored."""

    max_tokens: int | None = None
    n: int = 1
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class _Tokens(Generation):
    """`/inference/v1/generate`."""

    unused = ("prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders", *_UNUSED)

    def answer(self) -> dict[str, Any]:
        (request,) = self.requests
        more = {"model": self.model, "created": self.created}
        return {**super().answer(), **more, "prompt_token_ids": request.prompt_ids if self.return_ids else None}

    def chunk(self, place: int, delta: Delta) -> dict[str, Any]:
        chunk: dict[str, Any] = {**super().chunk(place, delta), "usage": None}
        # The spans are sent once, at the end, and cover the whole output.
        if not delta.finished and "weight_versions" in chunk["choices"][0]:
            chunk["choices"][0]["weight_versions"] = None
        return chunk

    def head(self) -> dict[str, Any]:
        return {"request_id": self.requests[0].id, "output_mode": "tokens"}

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        # vLLM counts only the tokens of its own answer. The progress lines have brought them already.
        left_out = usage["completion_tokens"] if self.progress.streamed else 0
        return {**usage, **{name: usage[name] - left_out for name in ("completion_tokens", "total_tokens")}}

    def choice(self, place: int, sequence: SimSequence, delta: Delta | None) -> dict[str, Any]:
        start, end = sequence.made(delta)
        if delta is None and self.progress.streamed:
            end = 0
        logprobs = None
        if sequence.request.params.logprobs:
            pairs = zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True)
            entries = ({"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in pairs)
            # vLLM's top_logprobs always holds the sampled token. The simulated model has no other candidates.
            logprobs = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
        keeps = self.call.engine.config.keeps_versions
        return {
            "index": place,
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output[start:end],
            "routed_experts": None,
            "sampling_mask": None,
            **({"weight_versions": as_weight_versions(sequence.versions)} if keeps else {}),
        }


class _OpenAI(Generation):
    """The common part of OpenAI's two APIs."""

    unused = ("service_tier", "system_fingerprint", *_UNUSED)

    def head(self) -> dict[str, Any]:
        return {"id": self.request_id, "created": self.created, "model": self.model}

    def choice(self, place: int, sequence: SimSequence, delta: Delta | None) -> dict[str, Any]:
        (start, end), whole = sequence.made(delta), delta is None
        ids = sequence.output[start:end] if self.return_ids else None
        return {
            "index": place,
            **self._content(sequence.text if delta is None else self._new_text(delta), whole=whole),
            "logprobs": self._logprobs(sequence, start, end) if sequence.request.params.logprobs else None,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            **({"token_ids": ids, "routed_experts": None} if whole else {"token_ids": ids} if ids is not None else {}),
        }

    @abstractmethod
    def _content(self, text: str, *, whole: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any]: ...

    def _new_text(self, delta: Delta) -> str:
        sequence = delta.sequence
        if sequence.request.params.stop:  # any part of it may be the start of a stop string
            return sequence.text if delta.finished else ""
        end = delta.end - (delta.finished and isinstance(sequence.stop_reason, int))
        return decode(sequence.output[delta.start : end], self.call.engine.config.eos_token_id)


class _Completion(_OpenAI):
    """`/v1/completions`."""

    whole_name = chunk_name = "text_completion"

    def choice(self, place: int, sequence: SimSequence, delta: Delta | None) -> dict[str, Any]:
        choice = super().choice(place, sequence, delta)
        prompt_ids = sequence.request.prompt_ids if self.return_ids else None
        return {**choice, "prompt_logprobs": None, "prompt_token_ids": prompt_ids} if delta is None else choice

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        del whole
        return {"text": text}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any]:
        as_ids = self.call.body.get("return_tokens_as_token_ids")
        ids, logprobs = sequence.output[start:end], sequence.logprobs[start:end]
        tokens = [f"token_id:{i}" if as_ids else character_of(i) for i in ids]
        return {
            "text_offset": list(range(start, end)),
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        }


class _Chat(_OpenAI):
    """`/v1/chat/completions`."""

    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def answer(self) -> dict[str, Any]:
        """Return the answer with one copy of the prompt's ids, not one per choice."""
        prompt_ids = self.requests[0].prompt_ids if self.return_ids else None
        return {**super().answer(), "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the role of each choice."""
        (request,) = self.requests
        for sequence in request.sequences:
            delta = {"role": "assistant", "content": ""}
            yield self.event([{"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None, "reasoning": None}}
        return {"delta": {"content": text}}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True):
            token = character_of(token_id)
            entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
            content.append({**entry, "top_logprobs": [entry] if self.call.body.get("top_logprobs") else []})
        return {"content": content}


async def generate(call: Call) -> web.StreamResponse:
    """`POST /inference/v1/generate`."""
    ids = checked_ids(call.body.get("token_ids"), "token_ids")
    sampling: dict[str, Any] = call.field("sampling_params", dict)
    room = call.engine.config.max_model_len
    params = _sampling(sampling, logprobs=sampling.get("logprobs") is not None, detokenize=False, max_tokens=room)
    answer = _Tokens(call, "generate-tokens", constrained=sampling.get("structured_outputs") is not None)
    limit = room if sampling.get("max_tokens") is None else None
    return await answer.run({answer.request_id: ids}, params, sampling.get("extra_args"), limit)


async def completions(call: Call) -> web.StreamResponse:
    """`POST /v1/completions`."""
    body = call.body
    with_logprobs = body.get("logprobs") is not None
    params = _sampling(body, logprobs=with_logprobs, detokenize=True, max_tokens=COMPLETIONS_MAX_TOKENS)
    answer = _Completion(call, "cmpl", constrained=_constrained(body))
    prompts = _prompts(body.get("prompt"), call.engine.config.vocab_size)
    named = {f"{answer.request_id}-{i}": ids for i, ids in enumerate(prompts)}
    return await answer.run(named, params, body.get("vllm_xargs"), None)


async def chat_completions(call: Call) -> web.StreamResponse:
    """`POST /v1/chat/completions`."""
    body, config = call.body, call.engine.config
    limit = body.get("max_tokens") if (most := body.get("max_completion_tokens")) is None else most
    given, with_logprobs = {**body, "max_tokens": limit}, bool(body.get("logprobs"))
    params = _sampling(given, logprobs=with_logprobs, detokenize=True, max_tokens=config.max_model_len)
    answer = _Chat(call, "chatcmpl", constrained=_constrained(body))
    ids = encode(chat_prompt(_messages(call)), config.vocab_size)
    unlimited = config.max_model_len if limit is None else None
    return await answer.run({answer.request_id: ids}, params, body.get("vllm_xargs"), unlimited)


async def models(call: Call) -> dict[str, Any]:
    """`GET /v1/models`."""
    config = call.engine.config
    base: dict[str, Any] = {"object": "model", "created": int(time.time()), "owned_by": "vllm", "permission": []}
    served = config.served_model_name
    data: list[dict[str, Any]] = [
        {"id": served, **base, "root": served, "parent": None, "max_model_len": config.max_model_len}
    ]
    for name, adapter in call.engine.adapters.loaded.items():
        data.append({"id": name, **base, "root": adapter.content, "parent": served, "max_model_len": None})
    return {"object": "list", "data": data}


async def tokenize(call: Call) -> dict[str, Any]:
    """`POST /tokenize`, of a prompt or of messages."""
    config = call.engine.config
    call.model()
    prompt = chat_prompt(_messages(call)) if call.body.get("prompt") is None else call.field("prompt", str)
    ids = encode(prompt, config.vocab_size)
    return {"count": len(ids), "max_model_len": config.max_model_len, "tokens": ids, "token_strs": None}


async def detokenize(call: Call) -> dict[str, Any]:
    """`POST /detokenize`."""
    config = call.engine.config
    tokens: list[int] = call.field("tokens", list)
    if outside := [i for i in tokens if i >= config.vocab_size]:
        raise RequestError(f"Token id {max(outside)} is out of vocabulary")
    return {"prompt": decode(tokens, config.eos_token_id)}


def checked_ids(value: Any, name: str) -> list[int]:
    """Return a list of token ids. Raises RequestError if the value is not such a list."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{name}: List should have at least 1 item of token ids")
    ids = cast("list[Any]", value)
    if any(type(i) is not int for i in ids):
        raise RequestError(f"{name}: Input should be a valid integer")
    return ids


def _prompts(prompt: Any, vocab_size: int) -> list[list[int]]:
    """Read a string, a list of strings, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [encode(prompt, vocab_size)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.")
    items = cast("list[Any]", prompt)
    if all(isinstance(item, str) for item in items):
        return [encode(item, vocab_size) for item in items]
    if all(isinstance(item, list) for item in items):
        return [checked_ids(item, f"prompt[{i}]") for i, item in enumerate(items)]
    return [checked_ids(items, "prompt")]


def _sampling(given: Mapping[str, Any], *, logprobs: bool, detokenize: bool, max_tokens: int) -> SamplingParams:
    """Read sampling parameters by vLLM's names. Ignore those without a use here.

    Raises:
        RequestError: a value of the wrong type or out of range.
    """
    try:
        read = _Sampling.model_validate(given).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise RequestError(f"{name}: {first['msg']}, got {reprlib.repr(first['input'])}") from None
    params = SamplingParams.of({"max_tokens": max_tokens, "logprobs": logprobs, "detokenize": detokenize, **read})
    if params.temperature == 0 and params.n > 1:
        raise RequestError(f"n must be 1 when using greedy sampling, got {params.n}.")
    return params


def _messages(call: Call) -> list[Mapping[str, Any]]:
    messages: list[Any] = call.field("messages", list)
    if not all(isinstance(message, dict) for message in messages):
        raise RequestError("messages: Field required, a list of messages")
    return messages


def _constrained(body: Mapping[str, Any]) -> bool:
    """Whether a request asks for output that vLLM makes under a grammar."""
    wanted: Any = body.get("response_format")
    typed = isinstance(wanted, dict) and cast("dict[str, Any]", wanted).get("type", "text") != "text"
    forced = body.get("tool_choice") not in (None, "auto", "none")
    return typed or forced or body.get("structured_outputs") is not None
