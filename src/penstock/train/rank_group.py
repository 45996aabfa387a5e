"""The ranks of a sharded learner as one group: how a process joins it, and how rank 0 tells the others what to do.

A message is JSON and raw tensors in safetensors' format. Nothing is pickled: who reaches a rank's port can send it
numbers and the name of a loss that is there, and no code.
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
"""For all ranks to be there; over several nodes, people start them."""
COLLECTIVE = timedelta(minutes=10)
"""For one collective of a step: a rank that hangs. One that died is noticed at once."""
IDLE = timedelta(days=365)
"""A follower waits for the next command as long as rank 0 lives: the end of its connection ends the wait."""
LOOPBACK = "127.0.0.1"
ANSWER_S = 10.0
"""For a Ray cluster to accept a connection."""
POLL_S = 0.05
_HEADER = "header"
GPU = "gpu"
"""Key of the store for the GPU that a Ray cluster gave rank 0; empty: none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among the ranks.

    Attributes:
        rank: from 0.
        size: number of ranks.
        local_rank: number on its host, which is the GPU it takes.
        store: where the ranks meet; a client of it in this process.
    """

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
        """The bytes, as a tensor."""
        header = torch.frombuffer(bytearray(json.dumps(self.values).encode()), dtype=torch.uint8)  # NaN and all
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return torch.frombuffer(bytearray(save({_HEADER: header, **tensors})), dtype=torch.uint8)

    @classmethod
    def unpack(cls, packed: Tensor) -> Message:
        """Read what `pack` made."""
        tensors = load(packed.numpy().tobytes())
        return cls(json.loads(tensors.pop(_HEADER).numpy().tobytes()), tensors)


def meeting_point(address: str) -> tuple[dist.Store, int]:
    """A store that listens at one address of this host, and its port."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # without the descriptor it would listen on all addresses
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return dist.PrefixStore(_prefix("0"), store), port


def store_at(address: str, port: int) -> dist.Store:
    """Reach what `meeting_point` made from another process."""
    return dist.PrefixStore(_prefix("0"), dist.TCPStore(address, port, is_master=False))


async def wait_ready(store: dist.Store, size: int) -> None:
    """Wait until the other ranks have imported what they need. LearnerError: they have not in time."""
    try:
        async with asyncio.timeout(JOIN.total_seconds()):
            while not store.check([_ready(rank) for rank in range(1, size)]):  # noqa: ASYNC110 - other processes set them
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise LearnerError(f"{size - 1} ranks were not ready within {JOIN.total_seconds():g} s") from error


def address_towards(cluster: str) -> str:
    """Return this host's address on its way to a Ray cluster, `host:port` or what Ray finds by itself."""
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
    """The place that torchrun's variables give, or those of `Ranks` for a child.

    Raises:
        ConfigError: a variable is no number, or nothing answers at the address.
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
    """This process as one of the ranks; one at a time in a process.

    Args:
        place: of this process.
        one_host: all ranks are here: their traffic stays on the loopback device.

    Attributes:
        rank: from 0.
        size: number of ranks.
        device: that this rank computes on.
        gloo: the ranks over gloo, whatever they compute on; `COLLECTIVE` bounds what they wait for in it.

    Raises:
        LearnerError: the others did not come in time.
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
        """Send a command to every other rank; on rank 0."""
        _send(message, partial(dist.broadcast, src=0, group=self._commands))

    def hear(self) -> Message:
        """Wait for the next command, for as long as `IDLE`; on the others."""
        return _receive(partial(dist.broadcast, src=0, group=self._commands))

    def answer(self, message: Message) -> None:
        """Send what came of a command to rank 0; on the others."""
        _send(message, partial(dist.send, dst=0, group=self.gloo))

    def answers(self) -> Sequence[Message]:
        """What every other rank answers, in their order; on rank 0."""
        return [_receive(partial(dist.recv, src=rank, group=self.gloo)) for rank in range(1, self.size)]

    def abort(self) -> None:
        """End collectives that wait for a rank which is gone. gloo's end by themselves, NCCL's never."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public one

    def close(self) -> None:
        """Leave the group; the process may join another."""
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
    """Have gloo listen on the loopback device: it takes the host name's address otherwise, which others may reach."""
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
