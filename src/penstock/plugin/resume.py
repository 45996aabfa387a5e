"""Resumes the samples that a request brings along (`wire.RESUME_ARG`), as another engine or an abort left them.

The answer is that of one undisturbed request. The core gets prompt and partial as its prompt, and the remaining limits.
vLLM's state of the request in the API server (detokenizer, stop strings, logprobs, versions) is fed the partial.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import reprlib
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, Strict, TypeAdapter, ValidationError

from penstock.errors import RequestError
from penstock.types import FinishReason
from penstock.wire import INITIAL_VERSION, RESUME_ARG, UNKNOWN_VERSION, spans_of

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positions = Annotated[list[tuple[int, _Finite, int, str | None]], Field(min_length=1)]
_LOGPROBS = TypeAdapter(list[_Positions], config=ConfigDict(strict=True))


class _Notes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    adapter: str = ""
    adapter_version: int = 0
    kv_kept: bool = False


_Version = Annotated[int, Field(ge=UNKNOWN_VERSION)]
_Lax = Strict(strict=False)  # JSON has no tuples
_Stretch = Annotated[tuple[_Version, PositiveInt], _Lax] | Annotated[tuple[_Version, PositiveInt, _Notes], _Lax]


class _Part(BaseModel):
    """One sample of `RESUME_ARG`, as `engine.partial.Partial.as_json` makes it; it goes on after vLLM's `error`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ids: list[int]
    logprobs: list[str]
    versions: list[_Stretch]
    finish: FinishReason | None
    stop_reason: int | str | None


def parts_of(text: Any, samples: int) -> list[Any]:
    """Read the value of `RESUME_ARG`; `check_part` has to check each part.

    Raises:
        RequestError: it is no JSON list of at most `samples` parts; any client can send it.
    """
    try:
        parts: Any = orjson.loads(text)
    except orjson.JSONDecodeError as error:  # also raised for too deep nesting and for values other than text
        raise RequestError(f"{RESUME_ARG}: {reprlib.repr(text)} is no JSON: {error}") from error
    _require(isinstance(parts, list), f"{reprlib.repr(text)} is no list")
    _require(len(parts) <= samples, f"{len(parts)} samples where the request asks for {samples}")
    return parts


def check_part(part: Any, *, room: int, vocab_size: int, logprobs: bool) -> list[Any]:
    """Check one sample of `RESUME_ARG` fully, since a bad one would kill vLLM's core.

    `room` is the most tokens that it may have. If `logprobs` are asked for, each token needs one.

    Returns:
        Its logprobs, for each token `[(token id, logprob, rank, text), ...]`; empty if it has none.

    Raises:
        RequestError: it does not fit.
    """
    try:
        given = _Part.model_validate(part)
        positions = [position for chunk in given.logprobs for position in _LOGPROBS.validate_json(chunk)]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"][:2])) or "a sample"
        raise RequestError(f"{RESUME_ARG}: {where}: {first['msg']}, got {reprlib.repr(first['input'])}") from error
    ids, tokens = given.ids, [entry[0] for position in positions for entry in position]
    wrong = [token for token in (*ids, *tokens) if not 0 <= token < vocab_size]
    _require(not wrong, f"token {reprlib.repr(wrong[:1])} lies outside the vocabulary [0, {vocab_size})")
    _require(not ids or len(ids) <= room - (given.finish is None), f"{len(ids)} tokens leave no room for another")
    covered = sum(stretch[1] for stretch in given.versions)
    _require(covered == len(ids), f"the versions {reprlib.repr(part['versions'])} do not cover {len(ids)} tokens")
    enough = len(positions) == len(ids) or not (positions or logprobs)
    _require(enough, f"{len(ids)} tokens but {len(positions)} logprobs")
    for token, position in zip(ids, positions, strict=False):
        _require(position[0][0] == token, f"the logprobs {reprlib.repr(position)} are not those of token {token}")
    return positions


def _require(fits: bool, message: str) -> None:  # noqa: FBT001 - a condition
    if not fits:
        raise RequestError(f"{RESUME_ARG}: {message}")


def part_of(request: Any, index: int, samples: int, config: Any) -> dict[str, Any] | None:
    """Take a sample's earlier progress out of an EngineCoreRequest's arguments; None: it has none.

    Raises:
        VLLMValidationError: it is inconsistent or does not fit this model. vLLM answers 400; its core would die of it.
    """
    # Copied, because the samples of one request may share their parameters.
    request.sampling_params = params = copy.copy(request.sampling_params)
    extra = dict(params.extra_args)
    given = extra.pop(RESUME_ARG)
    params.extra_args = extra or None
    try:
        return _checked(given, request, index, samples, config)
    except RequestError as error:
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - only inside vLLM

        raise VLLMValidationError(str(error)) from error


def _checked(text: Any, request: Any, index: int, samples: int, config: Any) -> dict[str, Any] | None:
    params, prompt = request.sampling_params, request.prompt_token_ids
    if prompt is None:
        raise RequestError(f"{RESUME_ARG}: the prompt is no list of token ids")
    parts = parts_of(text, samples)
    fits = {
        "room": min(config.max_model_len - len(prompt), params.max_tokens),
        "vocab_size": config.get_vocab_size(),
        "logprobs": getattr(params, "num_logprobs", params.logprobs) is not None,
    }
    # The first sample checks all parts. Otherwise earlier samples would continue after a later one is refused.
    for part in parts if index == 0 else ():
        check_part(part, **fits)
    if index >= len(parts) or not parts[index]["ids"]:
        return None
    return {**parts[index], "logprobs": check_part(parts[index], **fits)}


def seed(request: Any, state: Any, part: dict[str, Any]) -> None:
    """Give the partial to the core's request as prompt, to the state as output."""
    from vllm.logprobs import Logprob  # noqa: PLC0415 - only inside vLLM

    ids = part["ids"]
    params = request.sampling_params
    params.max_tokens = max(1, params.max_tokens - len(ids))
    params.min_tokens = max(0, params.min_tokens - len(ids))
    request.prompt_token_ids = [*request.prompt_token_ids, *ids]
    by_token = part["finish"] == "stop" and not isinstance(part["stop_reason"], str)
    for i, token in enumerate(ids):
        state.detokenizer.update([token], by_token and i == len(ids) - 1)
    processor = state.logprobs_processor
    if processor.logprobs is not None:
        for position in part["logprobs"]:
            processor.logprobs.append({token: Logprob(value, rank, text) for token, value, rank, text in position})
            processor.cumulative_logprob += position[0][1]
    if hasattr(state, "weight_version_starts"):
        for version, start, *_ in spans_of(part["versions"]):
            state.weight_version_starts.append((INITIAL_VERSION if version == 0 else str(version), start))


def emit(state: Any, part: dict[str, Any]) -> None:
    """Send the partial to the request's reader: at once in a stream, else as part of the whole answer."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason  # noqa: PLC0415 - only inside vLLM

    finish = part["finish"]
    reason = None if finish is None else FinishReason(FINISH_REASON_STRINGS.index(finish))
    output = state.make_request_output(list(part["ids"]), None, reason, part["stop_reason"])
    if output is not None:
        state.queue.put(output)
