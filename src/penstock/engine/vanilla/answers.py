"""The answers of vLLM's token endpoint as vLLM itself gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine import wire
from penstock.errors import EngineError
from penstock.types import Sample, SamplingParams, VersionSpan


def samples_of(answer: Mapping[str, Any], spans: Sequence[Any] | None, params: SamplingParams) -> list[Sample]:
    """The answer's samples, in order of their index.

    Args:
        answer: as the endpoint gives it.
        spans: `[[version, start, end], ...]` of each choice, where the answer itself has none (vLLM 0.26).
        params: of the request.

    Raises:
        EngineError: samples are missing, or their parts do not fit together (a logprob or a version for each token).
    """
    choices: list[Any] = sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(params.n)):
        raise EngineError(f"asked for {params.n} samples, got those with index {[c['index'] for c in choices]}")
    besides = wire.padded(spans, len(choices)) if spans else [None] * len(choices)
    return [_sample(choice, besides[i], params) for i, choice in enumerate(choices)]


def spans_of(choice: Mapping[str, Any], version: int | None) -> list[list[int]] | None:
    """`[[version, start, end], ...]` of a choice of vLLM's own answer; None where it is not known.

    Args:
        choice: vLLM 0.32 has its versions in it.
        version: that was in force all the time, where that is known.
    """
    native: Any = choice.get("weight_versions")
    if native is not None:
        return [[wire.version_of_tokens(s["version"]), s["start"], s["end"]] for s in native]
    length = len(choice["token_ids"] or ())
    return [[version, 0, length]] if version is not None and length else None if length else []


def _sample(choice: Mapping[str, Any], besides: Any, params: SamplingParams) -> Sample:
    ids = tuple(int(i) for i in choice["token_ids"] or ())
    logprobs = None
    if params.logprobs:
        given: Any = choice.get("logprobs")
        content: Any = given["content"] if given else ()
        logprobs = tuple(float(entry["logprob"]) for entry in content)
        if len(logprobs) != len(ids):
            raise EngineError(f"the answer has {len(ids)} tokens but {len(logprobs)} logprobs")
    reason = wire.finish_of(choice["finish_reason"])
    return Sample(token_ids=ids, finish_reason=reason, logprobs=logprobs, spans=_spans(choice, besides, len(ids)))


def _spans(choice: Mapping[str, Any], besides: Any, length: int) -> tuple[VersionSpan, ...]:
    native: Any = choice.get("weight_versions")
    if native is not None:
        spans = tuple(VersionSpan(wire.version_of_tokens(s["version"]), s["start"], s["end"]) for s in native)
    elif besides is not None:
        spans = tuple(VersionSpan(version, start, end) for version, start, end in besides)
    elif length == 0:
        spans = ()
    else:
        raise EngineError(
            "the answer does not say which weights made its tokens; use vLLM 0.32 or newer, or launch the engine "
            "through Penstock, whose plugin supplies it (of 0.26 without it, only who holds the fleet knows)"
        )
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != length or [span.start for span in spans] != edges[:-1]:
        raise EngineError(f"the answer's weight versions {spans} do not cover its {length} tokens exactly")
    return spans
