"""The device's checksum is exact, and sees what a transport can do to a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.weights.device_sum import DeviceSums, device_sums

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def by_definition(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8192)
    words = [[int(word) for word in row] for row in np.frombuffer(data, "<i8").reshape(-1, 1024)]
    rows = sum(sum(row) * (1_000_003 + number) for number, row in enumerate(words, 1))
    columns = sum(sum(column) * (998_244_353 + number) for number, column in enumerate(zip(*words, strict=True), 1))
    return (rows + columns) % 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (8, 1024), (33, 257)])
def test_is_what_its_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert device_sums([tensor]) == [by_definition(tensor)]


def test_wraps_around_without_an_error() -> None:
    tensor = torch.full((4, 6), 2**63 - 5, dtype=torch.int64)
    assert device_sums([tensor]) == [by_definition(tensor)]


def test_a_tensor_that_lies_between_words_counts_like_any_other() -> None:
    memory = torch.randint(0, 255, (30_000,), dtype=torch.uint8)
    for start in (1, 4, 8):
        part = memory[start : start + 20_000]
        assert device_sums([part]) == device_sums([part.clone()])


def test_words_that_change_places_in_a_row_or_between_rows_are_seen() -> None:
    tensor = torch.randint(-(2**62), 2**62, (4, 1024))
    in_row, between = tensor.clone(), tensor.clone()
    in_row[0, [3, 9]] = tensor[0, [9, 3]]
    between[[0, 2], 5] = tensor[[2, 0], 5]
    assert len(set(device_sums([tensor, in_row, between]))) == 3


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
    assert device_sums([]) == DeviceSums().values() == []
    assert device_sums([torch.empty(0, 4)]) == [0]


def test_many_tensors_at_once_have_the_sums_that_each_has_alone() -> None:
    tensors = [torch.randn(shape) for shape in [(3,), (2048, 7), (0,), (8192,), (1, 1), (100, 100)]]
    assert device_sums(tensors) == [device_sums([tensor])[0] for tensor in tensors]
