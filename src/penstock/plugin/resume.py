"""Resumes a sample that another engine, or an abort, left: the answer is that of one undisturbed request.

The engine core gets prompt and partial as its prompt, and the limits that are left. vLLM's state of the request in the
API server (detokenizer, stop strings, logprobs, versions) is fed the partial.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
from typing import Any

from penstock.errors import RequestError
from penstock.plugin.compat import seed_versions
from penstock.wire import RESUME_ARG, check_part, parts_of


def part_of(request: Any, index: int, samples: int, config: Any) -> dict[str, Any] | None:
    """What sample `index` of an EngineCoreRequest has already, taken out of its extra arguments.

    Args:
        request: not yet known to vLLM.
        index: among the samples of its prompt.
        samples: how many its prompt has.
        config: vLLM's ModelConfig.

    Raises:
        VLLMValidationError: it does not fit itself or this model. vLLM answers 400; its core would die of it.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None)
    if not extra or RESUME_ARG not in extra:
        return None
    # A copy, since the samples of one request may share their parameters.
    request.sampling_params = params = copy.copy(params)
    params.extra_args = {key: value for key, value in extra.items() if key != RESUME_ARG} or None
    try:
        return _checked(extra[RESUME_ARG], request, index, samples, config)
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
    # The first checks all: samples that vLLM has begun would go on when a later one is refused.
    for part in parts if index == 0 else ():
        check_part(part, **fits)
    if index >= len(parts) or not parts[index]["ids"]:
        return None
    return {**parts[index], "logprobs": check_part(parts[index], **fits)}


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
    seed_versions(state, part["versions"])


def emit(state: Any, part: dict[str, Any]) -> None:
    """Send the partial to the request's reader: at once in a stream, with the rest in an answer of one piece."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason  # noqa: PLC0415 - only inside vLLM

    finish = part["finish"]
    reason = None if finish is None else FinishReason(FINISH_REASON_STRINGS.index(finish))
    output = state.make_request_output(list(part["ids"]), None, reason, part["stop_reason"])
    if output is not None:
        state.queue.put(output)
