"""What a simulated engine answers; every token and logprob held against its position and its claimed version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import EngineDeadError
from penstock.sim import SimEngine
from penstock.sim.scheduler import SimSequence
from penstock.sim.tokens import Model, Prefix, Weights, banned_before_min, expected_logprob, expected_token
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import spans_of, version_of_tokens


async def generate(engine: SimEngine, prompt_ids: Sequence[int], params: Any = None, **options: Any) -> list[Sample]:
    """`n` samples of one prompt, without HTTP."""
    ended = asyncio.Event()
    given = SamplingParams.of(params)
    request = await engine.submit(prompt_ids, given, lambda delta: delta is None and ended.set(), **options)
    try:
        await ended.wait()
    finally:
        engine.drop(request)
    if engine.death is not None:
        raise EngineDeadError(engine.death)
    return [_sample_of(sequence) for sequence in request.sequences]


def _sample_of(sequence: SimSequence) -> Sample:
    params = sequence.request.params
    return Sample(
        token_ids=tuple(sequence.output),
        finish_reason=sequence.finish_reason or "abort",
        logprobs=tuple(sequence.logprobs) if params.logprobs else None,
        spans=tuple(
            VersionSpan(version_of_tokens(label), start, end, **(notes[0] if notes else {}))
            for label, start, end, *notes in spans_of(sequence.versions)
        ),
        text=sequence.text if params.detokenize else "",
    )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something in a sample that contradicts its claims."""

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
    adapter: str | Mapping[tuple[str, int | None], str] = "",
    context: int | None = None,
) -> list[Mismatch]:
    """Check every token and logprob of a sample against its position and claimed version; empty: all is right.

    Args:
        prompt_ids: shape `[P]`.
        sample: as the engine interface gives it, possibly of several engines' parts.
        model: of the engines (`SimConfig.model`).
        params: of the request.
        seeds: a token may come from any of these. Default: `[s, s + n)` for the request's (or the model's) seed `s`;
            give `[s + i]` to hold sample `i` to its own.
        adapter: path of the LoRA that made it, or by name and version as its spans have them.
        context: `max_model_len`, where samples may end before `max_tokens` because of it.
    """
    model, params = model or Model(), params or SamplingParams()
    start = model.seed if params.seed is None else params.seed
    choices: list[int | None] = [None] if params.temperature == 0 else list(seeds or range(start, start + params.n))
    length = len(sample.token_ids)
    edges = [0, *(span.end for span in sample.spans)]
    if edges[-1] != length or [span.start for span in sample.spans] != edges[:-1]:
        return [Mismatch(length, f"spans {sample.spans} do not cover {length} tokens exactly")]
    if sample.logprobs is not None and len(sample.logprobs) != length:
        return [Mismatch(length, f"{length} tokens but {len(sample.logprobs)} logprobs")]
    wrong: list[Mismatch] = []
    prefix = Prefix.of(prompt_ids)
    for i, (token, weights) in enumerate(zip(sample.token_ids, _weights_of(sample, adapter), strict=True)):
        version = weights.version
        banned = banned_before_min(model, params) if i < params.min_tokens else ()
        if all(token != expected_token(model, prefix, weights, seed=s, banned=banned) for s in choices):
            wrong.append(Mismatch(i, f"{token} is not the token of this position and version {version}"))
        elif sample.logprobs is not None:
            expected = expected_logprob(prefix, token, weights, temperature=params.temperature)
            if not math.isclose(sample.logprobs[i], expected, rel_tol=1e-9):
                wrong.append(Mismatch(i, f"logprob {sample.logprobs[i]}, under version {version} it is {expected}"))
        prefix = prefix.then(token)
    return wrong + _wrong_end(sample, model, params, None if context is None else context - len(prompt_ids))


def _weights_of(sample: Sample, adapter: str | Mapping[tuple[str, int | None], str]) -> Iterator[Weights]:
    """Yield the weights that made each token; those with kept KV attend to what the tokens before them attend to."""
    kv_version: int | None = None
    for span in sample.spans:
        if not span.kv_kept or kv_version is None:
            kv_version = span.version
        tuned = adapter
        if not isinstance(tuned, str):
            tuned = "" if span.adapter is None else tuned[span.adapter, span.adapter_version]
        for _ in range(span.start, span.end):
            yield Weights(span.version, kv_version, tuned)


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
