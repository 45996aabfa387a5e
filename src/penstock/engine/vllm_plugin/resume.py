"""Takes up a sample where another engine, or an abort, left it: the engine goes on as if it had made all of it itself.

The engine core gets prompt and partial as its prompt, and the limits that are left. vLLM's state of the request on the
API server's side (detokenizer, stop strings, logprobs, versions) is fed the partial, so that text, stop strings, tool
calls and usage of the answer are those of one undisturbed request.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

import orjson

from penstock.engine.wire import INITIAL_VERSION, RESUME_ARG


def part_of(request: Any, index: int) -> dict[str, Any] | None:
    """What sample `index` of an EngineCoreRequest has already, taken out of its extra arguments."""
    params = request.sampling_params
    extra = getattr(params, "extra_args", None)
    if not extra or RESUME_ARG not in extra:
        return None
    # A copy, since the samples of one request may share their parameters.
    request.sampling_params = params = copy.copy(params)
    params.extra_args = {key: value for key, value in extra.items() if key != RESUME_ARG} or None
    parts = orjson.loads(extra[RESUME_ARG])
    part = parts[index] if index < len(parts) else None
    return part if part and part["ids"] else None


def seed(request: Any, state: Any, part: dict[str, Any]) -> None:
    """Give the partial to the engine core's request as prompt and to the RequestState as output."""
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
    if hasattr(state, "weight_version_starts"):  # vLLM 0.32
        start = 0
        for version, tokens in part["versions"]:
            state.weight_version_starts.append((INITIAL_VERSION if version == 0 else str(version), start))
            start += tokens


def emit(state: Any, part: dict[str, Any]) -> None:
    """Put what was taken up before its reader: at once in a stream, with the rest in an answer of one piece."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason  # noqa: PLC0415 - only inside vLLM

    finish = part["finish"]
    reason = None if finish is None else FinishReason(FINISH_REASON_STRINGS.index(finish))
    output = state.make_request_output(list(part["ids"]), None, reason, part["stop_reason"])
    if output is not None:
        state.queue.put(output)
