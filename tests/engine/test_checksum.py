"""The checksum of weights in force: what must show in it, and what must not."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import WeightsError
from penstock.plugin.checksum import check_replicas, weights_checksum
from penstock.weights.manifest import kind_of


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.Parameter(torch.randn(3, 4, 6).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(6).to(dtype))
        self.scale = torch.nn.Parameter(torch.tensor(2.0).to(dtype))
        self.empty = torch.nn.Parameter(torch.empty(0, 4).to(dtype))


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


CHANGES = {
    "one value": lambda m: m.experts[0, 0, 0].add_(1e-3),
    "one sign": lambda m: m.scale.neg_(),
    "two rows": lambda m: swap(m.experts[1, 0], m.experts[1, 2]),
    "two experts": lambda m: swap(m.experts[0], m.experts[2]),
    "two values of a vector": lambda m: swap(m.bias[0], m.bias[2]),
    "two parameters": lambda m: swap(m.bias, m.experts[0, 0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_the_model_changes_the_checksum(change) -> None:
    model = Model()
    with torch.no_grad():
        change(model)
    assert weights_checksum(model) != weights_checksum(Model())


def test_only_weights_of_equal_shapes_are_compared() -> None:
    same, split = Model(), Model()
    with torch.no_grad():
        same.experts.mul_(2)
    split.experts = torch.nn.Parameter(split.experts[:, :2].clone())
    assert kind_of(weights_checksum(same)) == kind_of(weights_checksum(Model())) != kind_of(weights_checksum(split))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_equal_weights_have_equal_checksums_in_any_dtype(dtype: torch.dtype) -> None:
    assert weights_checksum(Model(dtype)) == weights_checksum(Model(dtype)) != weights_checksum(Model())


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
