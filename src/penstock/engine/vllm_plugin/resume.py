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

from penstock.engine.vllm_plugin.compat import seed_versions
from penstock.engine.wire import RESUME_ARG


def part_of(request: Any, index: int, config: Any) -> dict[str, Any] | None:
    """What sample `index` of an EngineCoreRequest has already, taken out of its extra arguments.

    Args:
        request: not yet known to vLLM.
        index: among the samples of its prompt.
        config: vLLM's ModelConfig.

    Raises:
        VLLMValidationError: it does not fit together or not this model. vLLM answers 400; its core, which checks
            nothing of the kind, would die.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None)
    if not extra or RESUME_ARG not in extra:
        return None
    # A copy, since the samples of one request may share their parameters.
    request.sampling_params = params = copy.copy(params)
    params.extra_args = {key: value for key, value in extra.items() if key != RESUME_ARG} or None
    parts = orjson.loads(extra[RESUME_ARG])
    part = parts[index] if index < len(parts) else None
    if not part or not part["ids"]:
        return None
    _check(part, request, config)
    part["logprobs"] = [position for chunk in part["logprobs"] for position in orjson.loads(chunk)]
    if params.logprobs is not None and len(part["logprobs"]) != len(part["ids"]):
        raise _refusal(f"{len(part['ids'])} tokens but {len(part['logprobs'])} logprobs")
    return part


def _check(part: dict[str, Any], request: Any, config: Any) -> None:
    ids, room = part["ids"], config.max_model_len - len(request.prompt_token_ids or ())
    if any(type(token) is not int or not 0 <= token < config.get_vocab_size() for token in ids):
        raise _refusal(f"a token lies outside the vocabulary [0, {config.get_vocab_size()})")
    left = min(room, request.sampling_params.max_tokens) - len(ids)
    if left < (0 if part["finish"] is not None else 1):
        raise _refusal(f"{len(ids)} tokens leave no room for another")
    if sum(tokens for _, tokens in part["versions"]) != len(ids):
        raise _refusal(f"the versions {part['versions']} do not cover {len(ids)} tokens")


def _refusal(message: str) -> Exception:
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - only inside vLLM

    return VLLMValidationError(f"{RESUME_ARG}: {message}")


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
    """Put what was taken up before its reader: at once in a stream, with the rest in an answer of one piece."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason  # noqa: PLC0415 - only inside vLLM

    finish = part["finish"]
    reason = None if finish is None else FinishReason(FINISH_REASON_STRINGS.index(finish))
    output = state.make_request_output(list(part["ids"]), None, reason, part["stop_reason"])
    if output is not None:
        state.queue.put(output)
