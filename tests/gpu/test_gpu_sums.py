"""Checksums on a GPU: one kernel, the same sums as on a CPU, at the speed of the memory."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from penstock.weights import checksum
from penstock.weights.checksum import DeviceSums, device_sums
from sum_samples import samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def found(tensors: list[torch.Tensor]) -> list[tuple[int, bool]]:
    sums = DeviceSums(finite=True)
    sums.add(*tensors)
    return sums.found()


def test_a_gpu_finds_what_a_cpu_finds_with_the_kernel_and_without() -> None:
    on_gpu = [tensor.cuda() for tensor in samples()]
    on_gpu[-1] = torch.stack([on_gpu[-1]] * 2)[1]  # lies between two words
    assert checksum._kernel(on_gpu[0].device) is not None
    assert found(on_gpu) == found(samples())
    with patch.object(checksum, "_kernel", lambda _: None):
        assert found(on_gpu) == found(samples())


def test_what_is_queued_is_not_waited_for_and_a_tensor_may_change_after_it() -> None:
    tensor = torch.randn(2**26, device="cuda")
    want = device_sums([tensor])
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # a second at least
    began = time.perf_counter()
    sums = DeviceSums()
    sums.add(tensor)
    tensor.zero_()
    assert time.perf_counter() - began < 0.2
    assert sums.values() == want
    assert time.perf_counter() - began > 0.2
