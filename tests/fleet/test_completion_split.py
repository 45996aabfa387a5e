from __future__ import annotations

import pytest

from penstock.engine.openai import join, split
from penstock.errors import RequestError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is an empty list"),
        (7, "got int"),
        ({"a": 1}, "got dict"),
        (["a", [1]], "mixes strings and token ids"),
        (["a", 1], r"prompt\[1\] is 1"),
        ([[1], []], r"prompt\[1\] is \[\]"),
        ([True, False], r"prompt\[0\] is True"),
        ([[1], [2.5]], r"prompt\[1\] is \[2.5\]"),
    ],
)
def test_other_forms_are_refused_with_their_place(prompt, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        split({"prompt": prompt})


def test_a_body_without_a_prompt_is_the_engines_to_refuse() -> None:
    assert split({"model": "m"}) == [{"model": "m"}]


def choice(index: int, text: str) -> dict:
    return {"index": index, "text": text, "finish_reason": "stop"}


def test_join_orders_by_prompt_then_sample_and_sums_usage() -> None:
    details = {"cached_tokens": 4}
    first = {
        "id": "cmpl-1",
        "choices": [choice(1, "a1"), choice(0, "a0")],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": None},
    }
    second = {
        "id": "cmpl-2",
        "choices": [choice(0, "b0"), choice(1, "b1")],
        "usage": {"prompt_tokens": 10, "total_tokens": 20, "prompt_tokens_details": details},
    }
    joined = join([first, second])
    assert [(c["index"], c["text"]) for c in joined["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert joined["usage"] == {"prompt_tokens": 13, "total_tokens": 25, "prompt_tokens_details": details}
    assert joined["id"] == "cmpl-1"
