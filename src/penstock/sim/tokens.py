"""What the simulated model says: pure functions, so that any token can be checked against where it claims to be from.

A token depends on every token before it, on its position, on the weights and on the seed. So a token that is lost,
doubled, moved to another request or labelled with another weight version shows in what follows or in its own logprob;
and a request that goes on elsewhere with prompt + partial gives the same continuation, as a real model's would.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from penstock.types import Sample, SamplingParams

_MASK = 2**64 - 1
_GREEDY = 0x67726565
_SEEDED = 0x73656564
_ID = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Prefix:
    """Everything before a token, folded: length and CRC-32 of the ids as little-endian int64."""

    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Self:
        """Fold a whole sequence."""
        return cls().extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> Self:
        """Several tokens more."""
        crc = zlib.crc32(array("q", token_ids).tobytes(), self.crc)
        return type(self)(self.length + len(token_ids), crc)

    def then(self, token_id: int) -> Prefix:
        """One token more."""
        return Prefix(self.length + 1, zlib.crc32(_ID.pack(token_id), self.crc))


@dataclass(frozen=True, slots=True)
class Model:
    """What makes one simulated model unlike another; equal for all engines of a fleet.

    Attributes:
        vocab_size: ids lie in `[0, vocab_size)`.
        eos_token_id: ends a sample.
        eos_share: probability that a token is EOS, so 1 / mean length; 0: only limits and stop tokens end a sample.
        seed: of requests that carry none.
    """

    vocab_size: int = 1024
    eos_token_id: int = 0
    eos_share: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights under which a token is made.

    `version` is theirs; `kv_version` the oldest of the KV blocks that the token attends to: differing from `version`,
    the token belongs to no version at all, which is what stale KV does to a real model. `adapter` names a LoRA.
    """

    version: int
    kv_version: int
    adapter: str = ""


def expected_token(
    model: Model, prefix: Prefix, weights: Weights, *, seed: int | None, banned: Collection[int] = ()
) -> int:
    """The id that follows `prefix`.

    Args:
        model: whose token.
        prefix: prompt and output before it.
        weights: in force when it is made.
        seed: the request's seed plus the sample's index (as vLLM seeds sample `i`); None: greedy, temperature 0.
        banned: ids that must not come (EOS and stop tokens before `min_tokens`).
    """
    draw = _draw(prefix, weights, _noise(seed))
    if model.eos_token_id not in banned and (draw >> 11) / 2**53 < model.eos_share:
        return model.eos_token_id
    while True:
        draw = _mix(draw)
        token = draw % model.vocab_size
        if token not in banned and token != model.eos_token_id:
            return token


def expected_logprob(prefix: Prefix, token_id: int, weights: Weights, *, temperature: float) -> float:
    """Log-probability of `token_id` after `prefix`, after temperature scaling, in [-8, 0).

    It does not depend on the seed: the same token in the same place has the same probability, however it came.
    Temperature 0 counts as 1, as in vLLM.
    """
    draw = _draw(prefix, weights, _scale(temperature) ^ _mix(token_id + 1))
    return -8.0 * (1 + (draw >> 32)) / 2**32


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something in a sample that is not what its claims say."""

    position: int
    """Index in the output; its length where the sample as a whole is wrong."""
    reason: str


def verify(
    prompt_ids: Sequence[int],
    sample: Sample,
    *,
    model: Model | None = None,
    params: SamplingParams | None = None,
    seeds: Iterable[int] | None = None,
    adapter: str = "",
    context: int | None = None,
) -> list[Mismatch]:
    """Check every token and logprob of a sample against its position and claimed version; empty: all is right.

    Args:
        prompt_ids: shape `[P]`.
        sample: as the engine interface gives it; it may have been put together from several engines' parts.
        model: of the engines (`SimConfig.model`).
        params: of the request.
        seeds: a token may come from any of these. Default: `[s, s + n)` for the request's (or the model's) seed `s`;
            give `[s + i]` to hold sample `i` to its own.
        adapter: path of the LoRA that made it.
        context: `max_model_len`, where samples may end before `max_tokens` because of it.
    """
    model, params = model or Model(), params or SamplingParams()
    start = model.seed if params.seed is None else params.seed
    choices: list[int | None] = [None] if params.temperature == 0 else list(seeds or range(start, start + params.n))
    versions, length = sample.versions(), len(sample.token_ids)
    edges = [0, *(span.end for span in sample.spans)]
    if edges[-1] != length or [span.start for span in sample.spans] != edges[:-1]:
        return [Mismatch(length, f"spans {sample.spans} do not cover {length} tokens exactly")]
    if sample.logprobs is not None and len(sample.logprobs) != length:
        return [Mismatch(length, f"{length} tokens but {len(sample.logprobs)} logprobs")]
    wrong: list[Mismatch] = []
    prefix = Prefix.of(prompt_ids)
    for i, (token, version) in enumerate(zip(sample.token_ids, versions, strict=True)):
        weights = Weights(version, version, adapter)
        banned = banned_before_min(model, params) if i < params.min_tokens else ()
        if all(token != expected_token(model, prefix, weights, seed=s, banned=banned) for s in choices):
            wrong.append(Mismatch(i, f"{token} is not the token of this position and version {version}"))
        elif sample.logprobs is not None:
            expected = expected_logprob(prefix, token, weights, temperature=params.temperature)
            if not math.isclose(sample.logprobs[i], expected, rel_tol=1e-9):
                wrong.append(Mismatch(i, f"logprob {sample.logprobs[i]}, under version {version} it is {expected}"))
        prefix = prefix.then(token)
    return wrong + _wrong_end(sample, model, params, None if context is None else context - len(prompt_ids))


def _wrong_end(sample: Sample, model: Model, params: SamplingParams, room: int | None) -> list[Mismatch]:
    """Whether the sample ends where it should."""
    length, reason = len(sample.token_ids), sample.finish_reason
    enders = set(params.stop_token_ids) if params.ignore_eos else {model.eos_token_id, *params.stop_token_ids}
    wrong: list[Mismatch] = []
    ends = [i for i, token in enumerate(sample.token_ids) if token in enders and i + 1 >= params.min_tokens]
    if ends and ends[0] != length - 1:
        wrong.append(Mismatch(ends[0], "the sample goes on after its end"))
    if reason == "stop" and not ends and not params.stop:
        wrong.append(Mismatch(length, "ended by `stop` without a token that stops it"))
    limit = params.max_tokens if room is None else min(params.max_tokens, room)
    if length > limit or (reason == "length" and length != limit):
        wrong.append(Mismatch(length, f"ended by `{reason}` with {length} tokens, the limit is {limit}"))
    return wrong


def banned_before_min(model: Model, params: SamplingParams) -> frozenset[int]:
    """Ids masked out until `min_tokens` have been made (vLLM's MinTokensLogitsProcessor)."""
    return frozenset({model.eos_token_id, *params.stop_token_ids})


def _draw(prefix: Prefix, weights: Weights, noise: int) -> int:
    place = _mix((prefix.length << 32) ^ prefix.crc)
    return _mix(place ^ _made_by(weights) ^ noise)


@lru_cache(maxsize=1024)
def _made_by(weights: Weights) -> int:
    adapter = zlib.crc32(weights.adapter.encode()) if weights.adapter else 0
    drawn = _mix((weights.version & _MASK) ^ (adapter << 32))
    return drawn if weights.kv_version == weights.version else drawn ^ _mix(~weights.kv_version & _MASK)


@lru_cache(maxsize=65_536)
def _noise(seed: int | None) -> int:
    return _GREEDY if seed is None else _mix(_mix(seed & _MASK) ^ _SEEDED)


@lru_cache(maxsize=1024)
def _scale(temperature: float) -> int:
    return _mix(struct.unpack("<q", struct.pack("<d", temperature or 1.0))[0] & _MASK)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
