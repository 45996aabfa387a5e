"""What engines say of their weights is compared rank by rank, like with like."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from penstock.checks import parse_json
from penstock.errors import WeightsError
from penstock.weights.manifest import WeightManifest, differ

GOOD = {"version": 1, "transport": "disk", "location": {}, "tensors": [["w", "float32", [2, 3], 0, 5]]}
MALFORMED = [
    [], 7, {"version": 1e30}, {"version": True}, {"version": 2**63}, {"location": []}, {"tensors": 3}, {"tensors": [7]},
    {"tensors": [["w", "float32", [1e30], 0, 5]]}, {"tensors": [["w", "float32", [-1], 0, 5]]},
    {"tensors": [["w", "float32", "23", 0, 5]]}, {"tensors": [["w", "float32", [2], float("inf"), 5]]},
    {"tensors": [["w", "float32", [2], 0, "5"]]}, {"tensors": [["w", "complex64", [2], 0, 5]]},
]  # fmt: skip


@pytest.mark.parametrize("damage", MALFORMED)
def test_a_malformed_manifest_is_a_named_error(damage: Any) -> None:
    for checksum in (2**63, 2**64 - 1):  # of a device's sum
        WeightManifest.from_json({**GOOD, "tensors": [["w", "float32", [2, 3], 0, checksum]]})
    with pytest.raises(WeightsError, match="malformed weight manifest"):
        WeightManifest.from_json({**GOOD, **damage} if isinstance(damage, dict) else damage)


def test_json_that_is_nested_without_end_is_a_named_error() -> None:
    for loads in (json.loads, orjson.loads):
        with pytest.raises(WeightsError, match="the note is not JSON that can be read"):
            parse_json(b"[" * 100_000, "the note", WeightsError, loads=loads)


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        ("a-b", "a-b", False),
        ("a-b", "a-c", True),
        ("sums:x-sums:x", "sums:x-b", False),
        ("spread:b-spread:c", "split:b-split:d", False),
    ],
)
def test_engines_differ_where_a_rank_of_one_kind_does(one: str, other: str, *, differing: bool) -> None:
    assert differ(one, other) == differ(other, one) == differing
