"""Replicas of one engine are compared rank by rank."""

from __future__ import annotations

import pytest

from penstock.engine.vllm_plugin.every_rank import check_replicas
from penstock.errors import WeightsError


@pytest.mark.parametrize(
    ("checksums", "replicas"),
    [
        (["a"], 1),
        (["a", "b"], 1),
        (["a", "a"], 2),
        (["a", "b"] * 3, 3),
        (["sums:x", "a"], 2),
        (["sums:x", "sums:x", "sums:x", "b", "a", "b"], 3),
    ],
)
def test_shards_differ_and_replicas_do_not(checksums: list[str], replicas: int) -> None:
    check_replicas(checksums, replicas)


@pytest.mark.parametrize(
    ("checksums", "replicas", "message"),
    [
        (["a", "b"], 2, "replica 1 has on rank 0 weights of checksum b, replica 0 of a"),
        (["a", "b", "a", "b", "a", "c"], 3, "replica 2 has on rank 1 weights of checksum c, replica 0 of b"),
        (["a", "b", "b", "a"], 2, "replica 1 has on rank 0"),
        (["sums:x", "sums:y"], 2, "replica 1 has on rank 0 weights of checksum sums:y, replica 0 of sums:x"),
        (["sums:x", "a", "b"], 3, "replica 2 has on rank 0 weights of checksum b, replica 1 of a"),
    ],
)
def test_a_replica_with_other_weights_is_found(checksums: list[str], replicas: int, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        check_replicas(checksums, replicas)
