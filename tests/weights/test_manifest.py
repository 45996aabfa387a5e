"""What engines say of their weights is compared rank by rank, like with like."""

from __future__ import annotations

import pytest

from penstock.weights.manifest import differ


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        ("a", "a", False),
        ("a", "b", True),
        ("a-b", "a-b", False),
        ("a-b", "a-c", True),
        ("sums:x", "sums:x", False),
        ("sums:x", "sums:y", True),
        ("sums:x", "a", False),
        ("sums:x-sums:x", "sums:x-b", False),
        ("sums:x-b", "sums:x-c", True),
        ("sums:x-sums:x", "sums:y-b", True),
        ("b-sums:x", "sums:x-c", False),
        ("spread:b-spread:c", "split:b-split:d", False),
        ("spread:b-spread:c", "spread:b-spread:d", True),
    ],
)
def test_engines_differ_where_a_rank_of_one_kind_does(one: str, other: str, *, differing: bool) -> None:
    assert differ(one, other) == differ(other, one) == differing
