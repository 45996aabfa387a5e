"""The device's checksum is exact, and sees what a transport can do to a tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.weights.checksum import DeviceSums, device_sums
from penstock.weights.pack import all_finite

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def weight(row: int, column: int) -> int:
    def mixed(x: int) -> int:
        return x * (0x243F6A8885A308D3 + 0x13198A2E03707344 * x)

    return (2048 * mixed(row) + 2 * mixed(column) + 1) % 2**64


def by_definition(tensor: torch.Tensor) -> int:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8").tolist()
    return sum(word * weight(*divmod(place, 1024)) for place, word in enumerate(words)) % 2**64


def moved(tensor: torch.Tensor, *places: int) -> torch.Tensor:
    """A copy in which the words at these places have each moved to the next one's, the last to the first's."""
    copy = tensor.clone()
    copy.view(-1)[[*places[1:], places[0]]] = tensor.view(-1)[[*places]]
    return copy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (8, 1024), (33, 257)])
def test_is_what_its_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    assert device_sums([tensor]) == [by_definition(tensor)]


def test_a_tensor_that_lies_between_words_counts_like_any_other() -> None:
    memory = torch.randint(0, 255, (30_000,), dtype=torch.uint8)
    for start in (1, 4, 8):
        part = memory[start : start + 20_000]
        assert device_sums([part]) == device_sums([part.clone()])


PLACES = st.integers(0, 64 * 1024 - 1)
WORDS = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@example(one=1, other=1024, word=1, differing=2, lowest=0)
@example(one=0, other=1024, word=1, differing=2**52, lowest=0)
@given(one=PLACES, other=PLACES, word=WORDS, differing=WORDS, lowest=st.integers(0, 63))
def test_two_words_that_change_places_are_seen_wherever_they_are(
    one: int, other: int, word: int, differing: int, lowest: int
) -> None:
    tensor = torch.zeros(64, 1024, dtype=torch.int64)
    tensor.view(-1)[other] = word ^ (differing >> lowest << lowest)
    tensor.view(-1)[one] = word
    apart = (one - other) & (other - one)  # the greatest power of two that divides how far they lie apart
    differ = int(tensor.view(-1)[one]) ^ int(tensor.view(-1)[other])
    seen = device_sums([tensor]) != device_sums([moved(tensor, one, other)])
    assert seen == (2 * apart * differ % 2**64 != 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_bit_of_one_value_is_seen_whichever_it_is(dtype: torch.dtype) -> None:
    tensor = torch.randn(8).to(dtype)
    bits = 8 * tensor.element_size()
    changed = [tensor.clone() for _ in range(8 * bits)]
    kinds = {16: torch.int16, 32: torch.int32, 64: torch.int64}
    for number, copy in enumerate(changed):
        bit = number % bits
        copy.view(kinds[bits])[number // bits] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
    assert device_sums([tensor])[0] not in device_sums(changed)


def test_nothing_has_the_sum_zero() -> None:
    assert device_sums([]) == DeviceSums().values() == []
    assert device_sums([torch.empty(0, 4)]) == [0]


def test_many_tensors_at_once_have_the_sums_that_each_has_alone() -> None:
    tensors = [torch.randn(shape) for shape in [(3,), (2048, 7), (0,), (8192,), (1, 1), (100, 100)]]
    assert device_sums(tensors) == [device_sums([tensor])[0] for tensor in tensors]


class Largest(TorchDispatchMode):
    """Notes the most elements of any result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results: Any = func(*args, **(kwargs or {}))
        several: Any = results if isinstance(results, tuple) else (results,)
        for result in several:
            self.elements = max(self.elements, result.numel() if isinstance(result, torch.Tensor) else 0)
        return results  # pyright: ignore[reportUnknownVariableType] - a tensor or a tuple of them


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_looked_at_for_nan_without_a_copy_or_a_mask_of_its_size(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000).to(dtype)
    with Largest() as largest:
        assert all_finite(tensor)
        for value in ("nan", "inf", "-inf"):
            tensor[500] = float(value)
            assert not all_finite(tensor)
    assert largest.elements == 1
    assert all_finite(tensor[:0])


PROGRAM = """
from penstock.weights import checksum, sum_kernel
from sum_samples import samples

def found(tensors):
    sums = checksum.DeviceSums(finite=True)
    sums.add(*tensors)
    return sums.found()

by_torch = found(samples())
assert 0 < sum(finite for _, finite in by_torch) < len(by_torch)
checksum._kernel = lambda device: sum_kernel.launch
sum_kernel.PROGRAMS = 3  # each is interpreted
by_kernel = found(samples())
assert by_kernel == by_torch, [pair for pair in zip(samples(), by_kernel, by_torch) if pair[1] != pair[2]]
print(len(by_kernel), "alike")
"""


def test_one_kernel_finds_what_torchs_operations_find() -> None:
    """By Triton's interpreter, which needs no GPU; `tests/gpu/test_gpu_sums.py` holds it compiled."""
    pytest.importorskip("triton")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("alike\n"), done.stderr[-3000:]
