"""Copies that CUDA IPC makes of tensors that engines cannot read where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import WeightsError
from penstock.weights.cuda_ipc import CudaIpcStore


def test_no_room_for_a_copy_is_told_with_what_to_do_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CudaIpcStore()
    empty = torch.empty

    def full_after_a_kilobyte(shape: Any, **how: Any) -> torch.Tensor:
        if torch.Size(shape).numel() > 256:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(shape, **how | {"device": "cpu"})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "empty", full_after_a_kilobyte)
    small, large = torch.zeros(256), torch.zeros(257)
    with pytest.raises(WeightsError, match=r"cuda:0 has no room .* 'large' \(1028 bytes, of cpu\) beside 1024 bytes"):
        store.publish(1, [("small", small), ("large", large)])
    assert store._copies == {}  # memory, which no answer shows
