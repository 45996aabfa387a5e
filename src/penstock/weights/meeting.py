"""Where the members of a group meet: one port of the trainer's, for those who have the group's key.

The key is random and another one for every group. Engines get it in the body of a control call, which asks for their
own key. Both ends of a connection prove that they have it (HMAC-SHA256 over a random number of each) before either
says anything else, so a stranger neither joins, nor reads, nor takes the trainer's place. Over these connections go
who is here, NCCL's unique id, why the group ended, and, among CPUs, the weights themselves.

What remains: the bytes are neither encrypted nor signed, so the network between hosts has to be trusted. NCCL opens
ports of its own, which take who shows a number of 64 random bits out of the unique id.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from penstock.errors import TransferError
from penstock.guard import Strangers, shut

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
"""A machine that vanished without a word is noticed after 35 s."""


class Meeting:
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
        self._lines: dict[int, socket.socket] = {}
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
        threading.Thread(target=self._accept, name="penstock-meeting", daemon=True).start()

    def set(self, name: str, value: bytes = b"") -> None:
        """Let everyone who waits for it have a value."""
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def get(self, name: str, timeout_s: float) -> bytes:
        """A value, when it is there. Raises TimeoutError after `timeout_s` seconds, TransferError at the end."""
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

    def lines(self) -> list[socket.socket]:
        """The connections for weights, by rank."""
        with self._changed:
            return [self._lines[rank] for rank in sorted(self._lines)]

    def end(self, why: str) -> None:
        """Tell every member why, and let none in any more; whatever waits returns."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended = why
            self._changed.notify_all()
            lines = list(self._lines.values())
        shut(self._listener)
        self._listener.close()
        for line in lines:
            shut(line)

    # --- connections -------------------------------------------------------------------------------------------------

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
        keep = False
        try:
            if self._proves(connection):
                self._strangers.remove(connection)
                while not keep:
                    keep = self._answer(connection)
        except (OSError, ValueError, TransferError):  # it is gone, or it is nobody we know
            pass
        finally:
            self._strangers.remove(connection)
            if not keep:
                connection.close()

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
        """One request of a member; whether the connection is one for weights from now on."""
        do, name_size, value_size = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
        if max(name_size, value_size) > MAX_VALUE:
            raise ValueError(f"a name or value of {max(name_size, value_size)} bytes")
        name = receive_exactly(connection, name_size).decode()
        value = receive_exactly(connection, value_size)
        if do == b"L":
            with self._changed:
                self._lines[int(name)] = connection
            _send(connection, found=True)
            self.set(f"line/{name}")
            return True
        if do == b"S":
            self.set(name, value)
            _send(connection, found=True)
        elif do == b"G":
            try:
                _send(connection, found=True, value=self.get(name, float(value)))
            except TimeoutError:
                _send(connection, found=False)
        else:
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None)
            _send(connection, found=True, value=str(self._ended).encode())
        return False


class Visit:
    """A member's connection, for one call at a time.

    Every method raises `OSError` where the trainer is gone or has ended the meeting; `ConnectionRefusedError`: it does
    not have the key, so it is another.
    """

    def __init__(self, address: str, port: int, key: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection((address, port), timeout=timeout_s)
        try:
            theirs = receive_exactly(self._socket, _NONCE)
            ours = secrets.token_bytes(_NONCE)
            self._socket.sendall(ours + _proof(key, b"member", theirs, ours))
            _check(receive_exactly(self._socket, _PROOF), _proof(key, b"trainer", theirs, ours))
            _tune(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def set(self, name: str, value: bytes = b"") -> None:
        """Let everyone who waits for it have a value."""
        self._call(b"S", name, value, self._timeout_s)

    def get(self, name: str, timeout_s: float) -> bytes:
        """A value, when it is there. Raises TimeoutError after `timeout_s` seconds."""
        found, value = self._call(b"G", name, str(timeout_s).encode(), timeout_s + MARGIN_S)
        if not found:
            raise TimeoutError(f"{name} was not there within {timeout_s:g} s")
        return value

    def until_ended(self) -> str:
        """Wait until the trainer ends the meeting; returns why."""
        return self._call(b"E", "", b"", None)[1].decode(errors="replace")

    def line(self, rank: int) -> socket.socket:
        """This connection, for the weights of this rank from now on."""
        self._call(b"L", str(rank), b"", self._timeout_s)
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """End it, also where another thread waits in it."""
        shut(self._socket)
        self._socket.close()

    def _call(self, do: bytes, name: str, value: bytes, timeout_s: float | None) -> tuple[bool, bytes]:
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_REQUEST.pack(do, len(name.encode()), len(value)) + name.encode() + value)
        found, size = _ANSWER.unpack(receive_exactly(self._socket, _ANSWER.size))
        return found, receive_exactly(self._socket, size)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises ConnectionResetError where the connection ends before."""
    found = bytearray(size)
    receive_into(connection, memoryview(found))
    return bytes(found)


def receive_into(connection: socket.socket, place: memoryview) -> None:
    """Fill `place`. Raises ConnectionResetError where the connection ends before."""
    while place:
        got = connection.recv_into(place)
        if not got:
            raise ConnectionResetError("the other end has closed the connection")
        place = place[got:]


def _send(connection: socket.socket, *, found: bool, value: bytes = b"") -> None:
    connection.sendall(_ANSWER.pack(found, len(value)) + value)


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise ConnectionRefusedError("who listens there does not have the group's key")


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
