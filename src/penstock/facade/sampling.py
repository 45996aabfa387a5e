"""vLLM's `SamplingParams` to the body of `/v1/completions`, which has the same names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from penstock.errors import RequestError

_ALWAYS = (
    "n", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sent even where they are vLLM's defaults: in the place of what is not said, a server puts the model's own."""
_IF_SET = (
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias",
    "structured_outputs", "thinking_token_budget", "repetition_detection", "watermarking",
)  # fmt: skip
_OURS = frozenset({
    "detokenize", "extra_args", "output_kind", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
    "stream_interval",
})  # fmt: skip
"""Read here, or about the way of an answer inside vLLM: it comes whole. vLLM sets `skip_reading_prefix_cache` itself
where prompt logprobs are asked for."""


def completion_fields(params: Any) -> dict[str, Any]:
    """The sampling part of a completion's body.

    Args:
        params: a `vllm.SamplingParams`.

    Raises:
        RequestError: it is something else, or sets what a completion cannot say.
    """
    names: Any = getattr(params, "__struct_fields__", None)
    if names is None or not {*_ALWAYS, "prompt_logprobs"} <= {*names}:
        raise RequestError(f"sampling_params must be vllm.SamplingParams, got {type(params).__name__}")
    plain = type(params)()
    body: dict[str, Any] = {name: getattr(params, name) for name in _ALWAYS}
    for name in cast("tuple[str, ...]", names):
        value = getattr(params, name)
        if name in _ALWAYS or name in _OURS or name.startswith("_") or _same(value, getattr(plain, name)):
            continue
        if name not in _IF_SET:
            raise RequestError(f"sampling parameter {name}={value!r} cannot be sent to an engine; leave it out")
        body[name] = _as_json(value)
    if params.extra_args:
        body["vllm_xargs"] = dict(params.extra_args)
    return body


def _same(value: Any, default: Any) -> bool:
    # Arrays do not compare to one truth value; their default is None.
    return value is default or (default is not None and value == default)


def _as_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if not f.name.startswith("_")}
        return {name: _as_json(item) for name, item in given.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    return value
