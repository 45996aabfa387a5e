"""Checks the samples that a request brings along for an engine to resume (`wire.RESUME_ARG`)."""

from __future__ import annotations

import reprlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, Strict, TypeAdapter, ValidationError

from penstock.errors import RequestError
from penstock.wire import RESUME_ARG, UNKNOWN_VERSION

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
    finish: Literal["stop", "length", "abort", "repetition"] | None
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
    with _malformed():
        given = _Part.model_validate(part)
        positions = [position for chunk in given.logprobs for position in _LOGPROBS.validate_json(chunk)]
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


@contextmanager
def _malformed() -> Generator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"][:2])) or "a sample"
        raise RequestError(f"{RESUME_ARG}: {where}: {first['msg']}, got {reprlib.repr(first['input'])}") from error


def _require(fits: bool, message: str) -> None:  # noqa: FBT001 - a condition
    if not fits:
        raise RequestError(f"{RESUME_ARG}: {message}")
