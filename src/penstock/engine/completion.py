"""OpenAI `/v1/completions` over many engines: one body into one part for each prompt, and the answers joined (R7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.errors import RequestError

FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def split(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One body for each prompt, in order. `n` stays: the samples of one prompt share its prefill.

    Raises:
        RequestError: the prompt has none of the four forms.
    """
    prompt: Any = body.get("prompt")
    if prompt is None or isinstance(prompt, str):
        return [dict(body)]  # without a prompt: the engine's own error is the clearest
    if not isinstance(prompt, Sequence):
        raise RequestError(f"prompt must be {FORMS}, got {type(prompt).__name__}")
    items = cast("Sequence[Any]", prompt)
    if not items:
        raise RequestError(f"prompt is an empty list; give {FORMS}")
    if all(_is_id(item) for item in items):
        return [dict(body)]
    if all(isinstance(item, str) for item in items) or all(_is_ids(item) for item in items):
        return [{**body, "prompt": item} for item in items]
    for i, item in enumerate(items):
        if not isinstance(item, str) and not _is_ids(item):
            raise RequestError(f"prompt[{i}] is {item!r}; prompt must be {FORMS}")
    raise RequestError(f"prompt mixes strings and token ids; it must be {FORMS}")


def join(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer of the parts' answers: choices in the order of the prompts and indexed anew, usage summed.

    The other fields are the first answer's. A single answer comes back as it is.
    """
    if len(answers) == 1:
        return dict(answers[0])
    choices: list[dict[str, Any]] = []
    for answer in answers:
        part: list[dict[str, Any]] = sorted(answer["choices"], key=lambda choice: choice["index"])
        first = len(choices)
        choices.extend({**choice, "index": first + i} for i, choice in enumerate(part))
    joined = {**answers[0], "choices": choices}
    usages = [answer["usage"] for answer in answers if answer.get("usage")]
    if usages:
        joined["usage"] = add_usage(usages)
    return joined


def add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Usage of several answers together."""
    total: dict[str, Any] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        if values and isinstance(values[0], Mapping):
            total[key] = add_usage(values)
        else:
            total[key] = sum(values) if values else None
    return total


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_ids(item: Any) -> bool:
    if isinstance(item, str) or not isinstance(item, Sequence):
        return False
    ids = cast("Sequence[Any]", item)
    return len(ids) > 0 and all(_is_id(i) for i in ids)
