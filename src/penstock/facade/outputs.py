"""Answers of `/v1/completions` to vLLM's own `RequestOutput`."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.errors import EngineError

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.logprobs import Logprob

# vLLM is imported in functions, since it takes seconds. A caller that sends its SamplingParams has it.

Decode = Callable[[int], str | None]
"""A token id to its text, where that is known."""
ID_PREFIX = "token_id:"
"""Before an id in the place of a token's text, with `return_tokens_as_token_ids`: texts of two tokens may be equal."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, ids, or both where the ids are those of the text."""

    text: str | None = None
    ids: Sequence[int] | None = None


def request_output(answer: Mapping[str, Any], prompt: Prompt, params: Any, lora: Any, decode: Decode) -> RequestOutput:
    """One prompt's answer as vLLM's offline API has it, finished.

    `weight_versions` of its outputs (vLLM 0.32) are exact; vLLM 0.26 has no such field, so they are an extra attribute.

    Args:
        answer: with token ids, in the body and in the place of tokens' texts.
        prompt: as it was given.
        params: the `vllm.SamplingParams` of the request.
        lora: its LoRARequest, or None.
        decode: makes `Logprob.decoded_token`.

    Raises:
        EngineError: the answer lacks what was asked for.
    """
    from vllm import RequestOutput  # noqa: PLC0415

    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != params.n:
        raise EngineError(f"asked for {params.n} samples, got {len(choices)}")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    answered = choices[0].get("prompt_token_ids")
    ids = prompt.ids if answered is None else answered
    return RequestOutput(
        request_id=str(answer["id"]),
        prompt=prompt.text,
        prompt_token_ids=None if ids is None else list(ids),
        prompt_logprobs=None if params.prompt_logprobs is None else _prompt_logprobs(choices[0]),
        outputs=[_completion_output(choice, params, lora, decode) for choice in choices],
        finished=True,
        lora_request=lora,
        num_cached_tokens=details.get("cached_tokens"),
    )


def _completion_output(choice: Mapping[str, Any], params: Any, lora: Any, decode: Decode) -> Any:
    from vllm.outputs import CompletionOutput  # noqa: PLC0415

    ids: list[int] | None = choice.get("token_ids")
    if ids is None:
        raise EngineError("the answer has no token ids; the engine must follow return_token_ids (vLLM 0.26 or newer)")
    logprobs = total = None
    if params.logprobs is not None:
        logprobs = _sample_logprobs(choice, ids, params.logprobs, decode)
        total = sum(entry[token].logprob for token, entry in zip(ids, logprobs, strict=True))
    output = CompletionOutput(
        index=choice["index"],
        text=choice["text"] if params.detokenize else "",
        token_ids=ids,
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        lora_request=lora,
    )
    spans = [dict(span) for span in choice.get("weight_versions") or ()]
    if any(field.name == "weight_versions" for field in fields(output)):
        from vllm.outputs import WeightVersionSpan  # noqa: PLC0415

        spans = [WeightVersionSpan(span["version"], span["start"], span["end"]) for span in spans]
    output.weight_versions = spans  # pyright: ignore[reportAttributeAccessIssue] - vLLM 0.26
    return output


def _sample_logprobs(
    choice: Mapping[str, Any], ids: Sequence[int], most: int, decode: Decode
) -> list[dict[int, Logprob]]:
    given = choice.get("logprobs") or {}
    values = given.get("token_logprobs") or ()
    tops = (given.get("top_logprobs") if most else None) or [None] * len(ids)
    if not len(values) == len(tops) == len(ids):
        raise EngineError(f"the answer has {len(ids)} tokens but {len(values)} logprobs")
    return [_position(*position, most, decode) for position in zip(ids, values, tops, strict=True)]


def _position(
    token: int, value: float, named: Mapping[str, float] | None, most: int, decode: Decode
) -> dict[int, Logprob]:
    """The sampled token first, as in vLLM, then the likeliest.

    Where the sampled token is none of the likeliest, the API does not say its rank: None.
    """
    from vllm.logprobs import Logprob  # noqa: PLC0415

    try:
        top = {int(name.removeprefix(ID_PREFIX)): other for name, other in (named or {}).items()}
    except ValueError as error:
        raise EngineError(f"the likeliest tokens come by their text and not their id: {error}") from error
    among = 0 < len(top) <= most or most < 0
    rank = 1 + sum(other > value for other in top.values()) if among else None
    entry = {token: Logprob(value, rank, decode(token))}
    likeliest = sorted(((other, lp) for other, lp in top.items() if other != token), key=lambda pair: -pair[1])
    for place, (other, lp) in enumerate(likeliest, 1):
        entry[other] = Logprob(lp, place + (rank is not None and place >= rank), decode(other))
    return entry


def _prompt_logprobs(choice: Mapping[str, Any]) -> list[dict[int, Logprob] | None]:
    from vllm.logprobs import Logprob  # noqa: PLC0415

    given = choice.get("prompt_logprobs")
    if given is None:
        raise EngineError("the engine gives no prompt logprobs; leave out SamplingParams(prompt_logprobs=...)")
    return [
        None if position is None else {int(token): Logprob(**entry) for token, entry in position.items()}
        for position in given
    ]
