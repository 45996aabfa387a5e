"""The ranks of a sharded learner as a group: joining it, and rank 0's commands.

A message is JSON and raw tensors in safetensors' format. Pickle is never used: a peer that reaches a rank's port can
send numbers and the name of an existing loss, but no code.
"""

# torch.distributed and safetensors ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from penstock.errors import ConfigError, LearnerError

JOIN = timedelta(minutes=5)
"""Time for all ranks to join. With several nodes, people start them."""
COLLECTIVE = timedelta(minutes=10)
"""Time limit of one collective, against a rank that hangs. The death of a rank is noticed at once."""
IDLE = timedelta(days=365)
"""Time that a follower waits for a command. If rank 0 ends, the lost connection ends the wait at once."""
LOOPBACK = "127.0.0.1"
ANSWER_S = 10.0
"""Seconds for a Ray cluster to accept a connection."""
POLL_S = 0.05
_HEADER = "header"
GPU = "gpu"
"""Key in the store for the GPU that a Ray cluster gave rank 0. Empty value: no GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process among the ranks. `local_rank`, its number on its host, selects its GPU."""

    rank: int
    size: int
    local_rank: int
    store: dist.Store


@dataclass(frozen=True, slots=True)
class Message:
    """JSON values, and tensors by name."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def pack(self) -> Tensor:
        header = torch.frombuffer(bytearray(json.dumps(self.values).encode()), dtype=torch.uint8)  # NaN is allowed
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return torch.frombuffer(bytearray(save({_HEADER: header, **tensors})), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: Tensor) -> Message:
        tensors = load(packed.numpy().tobytes())
        return cls(json.loads(tensors.pop(_HEADER).numpy().tobytes()), tensors)


def meeting_point(address: str) -> tuple[dist.Store, int]:
    """Return a store that listens at one address of this host, and its port."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # without the descriptor, it would listen on all addresses
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return dist.PrefixStore(_prefix("0"), store), port


def store_at(address: str, port: int) -> dist.Store:
    """Connect from another process to the store that `meeting_point` made."""
    return dist.PrefixStore(_prefix("0"), dist.TCPStore(address, port, is_master=False))


async def wait_ready(store: dist.Store, size: int) -> None:
    """Wait until the other ranks have imported what they need. LearnerError: they take too long."""
    try:
        async with asyncio.timeout(JOIN.total_seconds()):
            while not store.check([_ready(rank) for rank in range(1, size)]):  # noqa: ASYNC110 - other processes set them
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise LearnerError(f"{size - 1} ranks were not ready within {JOIN.total_seconds():g} s") from error


def address_towards(cluster: str) -> str:
    """Return this host's address as seen from a Ray cluster. `cluster`: `host:port`, or what Ray finds."""
    host, _, port = cluster.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as route:
            return route.getsockname()[0]
    except (socket.gaierror, ValueError):  # "auto"
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {cluster} (train.ray_address): {error}") from error


def _prefix(attempt: str) -> str:
    return f"penstock/{attempt}"


def _ready(rank: int) -> str:
    return f"ready/{rank}"


def place_of(taken: Mapping[str, str]) -> Place:
    """Return a place from torchrun's variables, or from those of `Ranks` for a child.

    Raises:
        ConfigError: a variable is not a number, or nothing answers at the address.
    """
    try:
        rank, size, port = int(taken["RANK"]), int(taken["WORLD_SIZE"]), int(taken["MASTER_PORT"])
        local_rank = int(taken.get("LOCAL_RANK", rank))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"RANK, LOCAL_RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from error
    hosts = rank == 0 and taken.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = taken["MASTER_ADDR"]
    try:
        store = dist.TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=JOIN)
    except RuntimeError as error:  # DistNetworkError among others
        raise ConfigError(f"rank {rank} cannot reach rank 0 at {address}:{port}: {error}") from error
    store = dist.PrefixStore(_prefix(taken.get("TORCHELASTIC_RESTART_COUNT", "0")), store)
    store.set(_ready(rank), "here")
    return Place(rank, size, local_rank, store)


class RankGroup:
    """This process as a member of the ranks. A process can be in one group at a time.

    If all ranks are on one host (`one_host`), their traffic uses the loopback device. `gloo` is the ranks' gloo group,
    on any device; `COLLECTIVE` limits each wait in it.

    Raises:
        LearnerError: the other ranks did not join in time.
    """

    def __init__(self, place: Place, *, one_host: bool = False) -> None:
        self.rank, self.size = place.rank, place.size
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
        if cuda:
            if place.local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {place.rank} needs a GPU of its own and there are {torch.cuda.device_count()}: ask for "
                    "fewer train.ranks"
                )
            torch.cuda.set_device(self.device)
        try:
            with _loopback() if one_host else nullcontext():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if cuda else "gloo",
                    store=place.store,
                    rank=place.rank,
                    world_size=place.size,
                    timeout=COLLECTIVE,
                )
                self.gloo: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE)
                self._commands: Any = dist.new_group(backend="gloo", timeout=IDLE if place.rank else COLLECTIVE)
        except RuntimeError as error:
            raise LearnerError(f"rank {place.rank} of {place.size} could not join the others: {error}") from error

    def tell(self, message: Message) -> None:
        """Send a command to every other rank; called on rank 0."""
        _send(message, partial(dist.broadcast, src=0, group=self._commands))

    def hear(self) -> Message:
        """Wait up to `IDLE` for the next command; called on the other ranks."""
        return _receive(partial(dist.broadcast, src=0, group=self._commands))

    def answer(self, message: Message) -> None:
        """Send the result of a command to rank 0; called on the other ranks."""
        _send(message, partial(dist.send, dst=0, group=self.gloo))

    def answers(self) -> Sequence[Message]:
        """Return the answers of all other ranks, in their order; called on rank 0."""
        return [_receive(partial(dist.recv, src=rank, group=self.gloo)) for rank in range(1, self.size)]

    def abort(self) -> None:
        """End collectives that wait for a lost rank. gloo's end by themselves, NCCL's never do."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public one

    def close(self) -> None:
        """Leave the group. The process may then join another one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _send(message: Message, put: Callable[[Tensor], Any]) -> None:
    packed = message.pack()
    put(torch.tensor([len(packed)]))
    put(packed)


def _receive(take: Callable[[Tensor], Any]) -> Message:
    size = torch.zeros(1, dtype=torch.int64)
    take(size)
    packed = torch.empty(int(size), dtype=torch.uint8)
    take(packed)
    return Message.unpack(packed)


@contextmanager
def _loopback() -> Generator[None]:
    """Make gloo listen on the loopback device. By default, it uses the host's address, which others may reach."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
