"""The device's checksum is exact, and sees what a transport can do to a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.weights.device_sum import device_sum, device_sums, read_sums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def by_definition(tensor: torch.Tensor) -> int:
    width = tensor.shape[-1] if tensor.dim() > 1 else 1
    signed = np.frombuffer(tensor.contiguous().view(-1).view(torch.uint8).numpy(), f"i{tensor.element_size()}")
    rows = [sum(int(bits) for bits in row) for row in signed.reshape(-1, width)]
    first, second = sum(rows), sum(row * number for number, row in enumerate(rows, 1))
    return (first * 1_000_003 + second) % 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4)])
def test_is_what_its_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert device_sums([tensor]) == [by_definition(tensor)]


def test_wraps_around_without_an_error() -> None:
    tensor = torch.full((4, 6), 2**63 - 5, dtype=torch.int64)
    assert device_sums([tensor]) == [by_definition(tensor)]


def test_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(37, 11)
    whole = device_sums([tensor])
    for chunk in (1, 12, 100):
        monkeypatch.setattr("penstock.weights.device_sum._CHUNK", chunk)
        assert device_sums([tensor]) == whole


def test_a_strided_tensor_counts_as_its_contiguous_copy() -> None:
    tensor = torch.randn(6, 8).t()
    assert device_sums([tensor]) == device_sums([tensor.contiguous()])


def test_sees_a_flipped_bit_a_moved_row_and_a_zeroed_end() -> None:
    tensor = torch.randn(16, 8).to(torch.bfloat16)
    flipped, moved, zeroed = tensor.clone(), tensor.roll(1, 0), tensor.clone()
    flipped.view(torch.int16)[3, 3] ^= 1
    zeroed[-1] = 0
    assert len(set(device_sums([tensor, flipped, moved, zeroed]))) == 4


def test_nothing_has_the_sum_zero() -> None:
    assert device_sums([]) == read_sums([]) == []
    assert int(device_sum(torch.empty(0, 4))) == 0
