"""The group over which weights are broadcast: its description, and the keyed port where its members meet.

The key is random and another one for every group. Engines get it in the body of a control call, which asks for their
own key. Both ends of a connection prove that they have it (HMAC-SHA256 over a random number of each) before either
says anything else, so a stranger neither joins, nor reads, nor takes the trainer's place. Over these connections go
who is here, NCCL's unique id, why the group ended, and, among CPUs, the weights themselves.

What remains: the bytes are neither encrypted nor signed, so the network between hosts has to be trusted. NCCL opens
ports of its own, which accept a number of 64 random bits out of the unique id.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

from penstock.errors import TransferError, WeightsError
from penstock.guard import Strangers, shut
from penstock.parsing import reading

Backend = Literal["nccl", "tcp"]

BUCKET_BYTES = 256 * 2**20
"""What travels in one group of collectives. At the 370 GB/s of NVLink it takes 0.7 ms, against some 20 us for
launching it; an engine that has no place for a tensor needs memory for two buckets, beside its KV cache."""
HANDSHAKE_S, STRANGERS = 10.0, 1024
"""Seconds that a connection has to prove itself, and how many there may be that have not: members come all at once."""
BACKLOG = 4096
"""A worker opens two connections or more; with a shorter queue hundreds of workers lost each other's."""
MARGIN_S = 5.0
"""What an answer may take besides the time that was asked for."""
MAX_VALUE = 2**20
"""Bytes of a key or value; NCCL's unique id has 128."""

_NONCE, _PROOF = 32, 32
_REQUEST, _ANSWER = struct.Struct("!cII"), struct.Struct("!?I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""A machine that vanished is noticed after 35 s."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group, and where in it an engine is.

    Attributes:
        address: where the trainer's `Rendezvous` listens; the trainer is rank 0.
        port: of that.
        world_size: the trainer and every worker of every engine.
        rank_offset: rank of the first worker of the engine that gets this.
        epoch: names the group; there is another one after every change of membership.
        backend: `nccl` among GPUs, `tcp` among CPUs.
        timeout_s: seconds for forming it, and for sending one version over it.
        key: what members prove to have; never shown.
    """

    address: str
    port: int
    world_size: int
    rank_offset: int
    epoch: str
    backend: Backend
    timeout_s: float
    key: str = field(repr=False)

    def at(self, rank_offset: int) -> Self:
        """Return the same group, as the engine with that first rank gets it."""
        return replace(self, rank_offset=rank_offset)

    def to_json(self) -> dict[str, Any]:
        """As it goes over the wire."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read what `to_json` wrote. Raises WeightsError where a field is missing or makes no sense."""
        fields: Any = data
        with reading("group", WeightsError):
            spec = cls(
                address=str(fields["address"]),
                port=int(fields["port"]),
                world_size=int(fields["world_size"]),
                rank_offset=int(fields["rank_offset"]),
                epoch=str(fields["epoch"]),
                backend=fields["backend"],
                timeout_s=float(fields["timeout_s"]),
                key=str(fields["key"]),
            )
        if spec.backend not in get_args(Backend):
            raise WeightsError(f"a group's backend is one of {', '.join(get_args(Backend))}, got {spec.backend!r}")
        if not (0 < spec.rank_offset < spec.world_size and 0 < spec.port < 2**16 and 0 < spec.timeout_s < float("inf")):
            raise WeightsError(f"malformed group {spec}: 0 < rank_offset < world_size, a port and a timeout are needed")
        if not spec.key:
            raise WeightsError(f"malformed group {spec}: it has no key")
        return spec


class Rendezvous:
    """The trainer's side: values that members set and get, and their connections for weights; thread-safe.

    Args:
        address: it listens there and nowhere else.
        key: of the group.

    Raises:
        TransferError: it cannot listen there.
    """

    def __init__(self, address: str, key: str) -> None:
        self._key = key
        self._values: dict[str, bytes] = {}
        self._streams: dict[int, socket.socket] = {}
        self._strangers = Strangers(STRANGERS)
        self._changed = threading.Condition()
        self._ended: str | None = None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            message = f"cannot listen on {address!r} for engines: {error}; set fleet.weight_address"
            raise TransferError(message) from error
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="penstock-rendezvous", daemon=True).start()

    def set(self, name: str, value: bytes = b"") -> None:
        """Let every member that waits for it have a value."""
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def get(self, name: str, timeout_s: float) -> bytes:
        """Return a value, when it is there. Raises TimeoutError after `timeout_s` seconds, TransferError at the end."""
        if self.missing([name], timeout_s):
            raise TimeoutError(f"{name} was not there within {timeout_s:g} s")
        return self._values[name]

    def missing(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """Wait until all of these are there; returns those that are not after `timeout_s` seconds.

        Raises:
            TransferError: it has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or self._values.keys() >= set(names), timeout_s)
            if self._ended is not None:
                raise TransferError(self._ended)
            return [name for name in names if name not in self._values]

    def streams(self) -> list[socket.socket]:
        """Return the connections for weights, by rank."""
        with self._changed:
            return [self._streams[rank] for rank in sorted(self._streams)]

    def end(self, why: str) -> None:
        """Tell every member why, and let none in any more; whatever waits returns."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = why
            self._changed.notify_all()
            streams = list(self._streams.values())
        shut(self._listener)
        self._listener.close()
        for stream in streams:
            shut(stream)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._ended is not None:
                    return
                time.sleep(0.05)  # no descriptor is left; there is no event of one that is
                continue
            self._strangers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="penstock-member", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError, ValueError, TransferError):  # it is gone, or no member
            stack.callback(connection.close)
            stack.callback(self._strangers.remove, connection)
            if self._proves(connection):
                self._strangers.remove(connection)
                while not self._answer(connection):
                    pass
                stack.pop_all()

    def _proves(self, connection: socket.socket) -> bool:
        connection.settimeout(HANDSHAKE_S)
        ours = secrets.token_bytes(_NONCE)
        connection.sendall(ours)
        said = receive_exactly(connection, _NONCE + _PROOF)
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._key, b"member", ours, theirs)):
            return False
        connection.sendall(_proof(self._key, b"trainer", ours, theirs))
        _tune(connection)
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request of a member; returns whether the connection is one for weights from now on."""
        kind, name_size, value_size = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
        if max(name_size, value_size) > MAX_VALUE:
            raise ValueError(f"a name or value of {max(name_size, value_size)} bytes")
        name = receive_exactly(connection, name_size).decode()
        value = receive_exactly(connection, value_size)
        if kind == b"L":
            with self._changed:
                self._streams[int(name)] = connection
            _send(connection, found=True)
            self.set(f"stream/{name}")
            return True
        if kind == b"S":
            self.set(name, value)
            _send(connection, found=True)
        elif kind == b"G":
            try:
                _send(connection, found=True, value=self.get(name, float(value)))
            except TimeoutError:
                _send(connection, found=False)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None)
            _send(connection, found=True, value=str(self._ended).encode())
        return False


class RendezvousClient:
    """A member's connection, for one call at a time.

    Every method raises `OSError` where the trainer is gone or has ended the group; `ConnectionRefusedError`: it does
    not have the key, so it is another.
    """

    def __init__(self, address: str, port: int, key: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        with ExitStack() as undo:
            self._socket = undo.enter_context(socket.create_connection((address, port), timeout=timeout_s))
            theirs = receive_exactly(self._socket, _NONCE)
            ours = secrets.token_bytes(_NONCE)
            self._socket.sendall(ours + _proof(key, b"member", theirs, ours))
            proof = receive_exactly(self._socket, _PROOF)
            if not hmac.compare_digest(proof, _proof(key, b"trainer", theirs, ours)):
                raise ConnectionRefusedError(f"the listener at {address}:{port} does not have the group's key")
            _tune(self._socket)
            undo.pop_all()

    def set(self, name: str, value: bytes = b"") -> None:
        """Let every member that waits for it have a value."""
        self._call(b"S", name, value, self._timeout_s)

    def get(self, name: str, timeout_s: float) -> bytes:
        """Return a value, when it is there. Raises TimeoutError after `timeout_s` seconds."""
        found, value = self._call(b"G", name, str(timeout_s).encode(), timeout_s + MARGIN_S)
        if not found:
            raise TimeoutError(f"{name} was not there within {timeout_s:g} s")
        return value

    def until_ended(self) -> str:
        """Wait until the trainer ends the group; returns why."""
        return self._call(b"E", "", b"", None)[1].decode(errors="replace")

    def stream(self, rank: int) -> socket.socket:
        """Return this connection, for the weights of this rank from now on."""
        self._call(b"L", str(rank), b"", self._timeout_s)
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """End it, also where another thread waits in it."""
        shut(self._socket)
        self._socket.close()

    def _call(self, kind: bytes, name: str, value: bytes, timeout_s: float | None) -> tuple[bool, bytes]:
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_REQUEST.pack(kind, len(name.encode()), len(value)) + name.encode() + value)
        found, size = _ANSWER.unpack(receive_exactly(self._socket, _ANSWER.size))
        return found, receive_exactly(self._socket, size)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes. Raises ConnectionResetError where the connection ends before."""
    found = bytearray(size)
    receive_into(connection, memoryview(found))
    return bytes(found)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises ConnectionResetError where the connection ends before."""
    while target:
        received = connection.recv_into(target)
        if not received:
            raise ConnectionResetError("the other end has closed the connection")
        target = target[received:]


def _send(connection: socket.socket, *, found: bool, value: bytes = b"") -> None:
    connection.sendall(_ANSWER.pack(found, len(value)) + value)


def _proof(key: str, side: bytes, trainers: bytes, members: bytes) -> bytes:
    return hmac.digest(key.encode(), side + trainers + members, "sha256")


def _tune(connection: socket.socket) -> None:
    """For as long as the group is there."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
