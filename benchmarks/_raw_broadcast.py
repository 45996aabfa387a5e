"""The link itself: a NCCL broadcast of tensors of given sizes to processes that do nothing with them.

As a program it is a receiver: python benchmarks/_raw_broadcast.py PORT RANK WORLD_SIZE LARGEST_BYTES GPU, with the
sizes on stdin.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _line_process import LineProcess

DEADLINE = timedelta(seconds=120)


def join(port: int, rank: int, world: int) -> None:
    """The default group of this process."""
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=DEADLINE,
        device_id=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip


def broadcast(tensors: Sequence[torch.Tensor]) -> float:
    """Seconds, from rank 0, all enqueued at once."""
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for tensor in tensors:
        dist.broadcast(tensor, src=0, async_op=True)
    dist.barrier()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class Peers:
    """Receivers on other GPUs, started and ended by the sender."""

    def __init__(self, port: int, gpus: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        largest = max(tensor.nbytes for tensor in tensors)
        self._peers: list[LineProcess] = []
        for rank, gpu in enumerate(gpus, 1):
            place = map(str, (port, rank, 1 + len(gpus), largest, gpu))
            self._peers.append(LineProcess([sys.executable, str(Path(__file__)), *place]))
            for tensor in tensors:
                self._peers[-1].tell(str(tensor.nbytes))
            self._peers[-1].tell("")
        join(port, 0, 1 + len(gpus))

    def round(self, tensors: Sequence[torch.Tensor]) -> float:
        """Seconds of one broadcast of all tensors."""
        for peer in self._peers:
            peer.tell("go")
        return broadcast([tensor.view(-1).view(torch.uint8) for tensor in tensors])

    def close(self) -> None:
        """End the receivers."""
        for peer in self._peers:
            peer.close()
        dist.destroy_process_group()


def receive() -> None:
    """One receiver; every tensor lands in the same memory."""
    port, rank, world, largest, gpu = map(int, sys.argv[1:])
    torch.cuda.set_device(gpu)
    join(port, rank, world)
    memory = torch.empty(largest, dtype=torch.uint8, device="cuda")
    sizes = []
    while line := sys.stdin.readline().strip():
        sizes.append(int(line))
    while sys.stdin.readline().strip() == "go":
        broadcast([memory[:size] for size in sizes])


if __name__ == "__main__":
    receive()
