"""One group of the trainer and the workers, apart from their own process groups: formed, used, cut.

Every member has one connection to the trainer's port. It carries the presence of members, the messages of NCCL's
ranks, the reason why the group ended and, among CPUs, the weights. When it ends, the other side is gone, so no rank
waits in a collective for a lost rank. `torch.distributed`'s default group is left alone: the trainer has one.

Each group has its own random key. Engines get it in the body of a control call, which requires their own key. Both ends
of a connection prove that they have the group's key (HMAC-SHA256 over a random number of each) before they say anything
else. So a stranger can neither join, nor read, nor take the trainer's place. The bytes are neither encrypted nor
signed, so the network between hosts must be trusted. NCCL opens its own ports. They accept connections by a number of
64 random bits from the unique id.
"""
# ruff: noqa: SLF001 - torch's init_process_group makes its groups of names with an underscore
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import hmac
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO
from weakref import WeakSet

import torch
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from penstock.errors import TransferError
from penstock.guard import Strangers, shut
from penstock.weights.broadcast import GroupSpec

HANDSHAKE_S, STRANGERS = 10.0, 1024
"""Seconds that a connection has to prove itself, and how many unproven ones may be open: members come all at once."""
MAX_NAME, MAX_VALUE = 2**10, 2**20
"""Most bytes in a member's name and value. NCCL's unique id has 128."""
_NONCE, _PROOF = 32, 32
_TENSOR, _END, _GO, _HERE, _NCCL = "tensor", "end", "go", "here/", "nccl/"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Keepalive probes notice a vanished machine after 35 s."""
_LONG = timedelta(days=1)
"""Value for torch's own deadlines, which end the process or leave it hanging. Our own timers cut the group instead."""
_NCCL_ENV = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read by ProcessGroupNCCL's constructor (torch 2.11 to 2.13). By default its watchdog ends the process when a peer
dies, and one of its threads asks the store every second, even while Python ends. The variables are set only while our
group is created. Other groups of the process keep their settings."""
_nccl_env_lock = threading.Lock()
_inside: WeakSet[threading.Thread] = WeakSet()  # threads that were started to call into torch


class Group:
    """One rank's part in one group. It is thread-safe, and every method that waits is blocking.

    Rank 0 is the trainer's. It needs a `listener` on its port (`listen`).
    """

    def __init__(self, spec: GroupSpec, rank: int, device: torch.device, listener: socket.socket | None = None) -> None:
        self.spec = spec
        self.device = device
        self.ready = False
        self.cut: str | None = None
        """Reason why the group ended; None while it is intact."""
        self.absent: tuple[int, ...] = ()
        """Ranks that did not join before the deadline, or the rank that left the group."""
        self._rank = rank
        self._listener = listener
        self._peers: list[socket.socket] = []
        """On the trainer: connections to all members. On a member: the connection to the trainer."""
        self._values: dict[str, bytes] = {}
        """Values by name. The trainer forwards its own values, and those of NCCL's ranks, to every member."""
        self._targets: deque[memoryview] = deque()
        """Memory for the next tensors that arrive."""
        self._changed = threading.Condition()
        self._sends = threading.Lock()
        self._in_tensor = False
        self._store: Store | None = None
        """Kept as long as the backend: torch finds our methods only through the Python object."""
        self._backend: Any = None
        """NCCL's process group."""
        if listener is not None:
            threading.Thread(target=self._accept, args=(listener,), name="penstock-rendezvous", daemon=True).start()

    def form(self) -> None:
        """Form the group with all other ranks. Rank 0 leads.

        Raises:
            TransferError: the group was not formed within the deadline (then see `absent`), or was cut.
        """
        with self._or_cut(f"group {self.spec.epoch} was not formed"):
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # for this thread
            if self._listener is None:
                self.connect()
                self.set(f"{_HERE}{self._rank}")
                self.get(_GO, 2 * self.spec.timeout_s)  # the trainer gives up first, as it knows who is missing
                self._connect_ranks()
                self.set(f"ready/{self._rank}")
            else:
                self._await_all("here")
                self.set(_GO)
                self._connect_ranks()
                self._await_all("ready")

    @contextmanager
    def _or_cut(self, what: str) -> Generator[None]:
        self._check()
        try:
            yield
        except (RuntimeError, OSError) as error:
            self.end(f"{what}: {error}")
            raise TransferError(str(self.cut)) from error

    def _await_all(self, step: str) -> None:
        ranks = {f"{step}/{rank}": rank for rank in range(1, self.spec.world_size)}
        if missing := self.missing(list(ranks), self.spec.timeout_s):
            self.absent = tuple(ranks[name] for name in missing)
            raise TimeoutError(f"ranks {list(self.absent)} did not come within {self.spec.timeout_s:g} s ({step})")

    def _connect_ranks(self) -> None:
        """Connect NCCL's ranks by sending one element to all, until the deadline or a cut.

        NCCL has no deadline for this, and it cannot be interrupted if a rank hangs or is unreachable. So it runs in a
        thread, which is then left alone.
        """

        def connect() -> None:
            try:
                self._connect_backend()
                self.wait(self.start([torch.zeros(1, device=self.device)]))
                self.synchronize()
            except (RuntimeError, OSError, TransferError) as error:
                self.end(f"group {self.spec.epoch} was not formed: {error}")
            else:
                with self._changed:
                    self.ready = True
                    self._changed.notify_all()

        with self.within(self.spec.timeout_s):
            _start("penstock-connect", connect)
            with self._changed:
                self._changed.wait_for(lambda: self.ready or self.cut is not None)
        self._check()

    def _connect_backend(self) -> None:
        if self.spec.backend == "nccl":
            torch.cuda.set_device(self.device)  # for this thread
            self._store = NcclStore(self)
            backend = _nccl(self._store, self._rank, self.spec.world_size)
            with self._changed:
                self._check()
                self._backend = backend

    def set(self, name: str, value: bytes = b"") -> None:
        """Send a value to the trainer, or to every member. OSError: broken connection."""
        if self._listener is not None:
            self._note(name, value)
        frame = _head(name, len(value)) + value
        with self._sends:
            for peer in self._peers:
                peer.sendall(frame)

    def get(self, name: str, timeout_s: float) -> bytes:
        """Return a value when it comes. TimeoutError: it is late; TransferError: a cut."""
        if self.missing([name], timeout_s):
            raise TimeoutError(f"{name} was not there within {timeout_s:g} s")
        return self._values[name]

    def missing(self, names: Sequence[str], timeout_s: float) -> list[str]:
        """Wait up to `timeout_s` seconds for values; return the missing names. TransferError: the group was cut."""
        with self._changed:
            self._changed.wait_for(lambda: self.cut is not None or self._values.keys() >= set(names), timeout_s)
            self._check()
            return [name for name in names if name not in self._values]

    def connect(self) -> None:
        """Connect a member to the trainer. ConnectionRefusedError: the listener does not have the key."""
        address = (self.spec.address, self.spec.port)
        connection = socket.create_connection(address, timeout=self.spec.timeout_s)
        with ExitStack() as undo:
            undo.callback(connection.close)
            said = connection.makefile("rb")
            _prove(connection, said, self.spec.key)
            self._add(connection)
            undo.pop_all()
        threading.Thread(target=self._listen_to, args=(connection, said), name="penstock-group", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        strangers = Strangers(STRANGERS)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self.cut is not None:
                    return
                time.sleep(0.05)  # no descriptor is free, and no event reports a free one
                continue
            strangers.add(connection)
            serve = partial(self._serve, connection, strangers)
            threading.Thread(target=serve, name="penstock-member", daemon=True).start()

    def _serve(self, connection: socket.socket, strangers: Strangers) -> None:
        with ExitStack() as undo, suppress(OSError, TransferError):  # the connection is gone, or is not from a member
            undo.callback(connection.close)
            undo.callback(strangers.remove, connection)
            connection.settimeout(HANDSHAKE_S)
            said = connection.makefile("rb")
            if _proves(connection, said, self.spec.key):
                strangers.remove(connection)
                self._add(connection)
                undo.pop_all()
                self._listen_to(connection, said)

    def _add(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in (*_KEEPALIVE, (socket.TCP_NODELAY, 1)):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        with self._changed:
            self._check()
            self._peers.append(connection)

    def _listen_to(self, connection: socket.socket, said: BinaryIO) -> None:
        """Process a peer's messages until its connection ends."""
        rank = 0
        with suppress(OSError, ValueError, TransferError):
            while True:
                name = self._take(said)
                rank = int(name.removeprefix(_HERE)) if name.startswith(_HERE) else rank
        if self._listener is None:
            self.end("the trainer is gone, or has cut the group")
        elif rank and self.cut is None:  # else this side ended the connection
            self.absent = self.absent or (rank,)
            self.end(f"rank {rank} has left the group")
        with self._sends:
            if connection in self._peers:
                self._peers.remove(connection)
            said.close()
            connection.close()

    def _take(self, said: BinaryIO) -> str:
        """Process one value, and return its name. ValueError: the stream ended, or the value is malformed."""
        name, _, digits = said.readline(MAX_NAME).decode().rpartition(" ")
        size = int(digits)
        if name == _TENSOR and self._listener is None:
            self._fill(said, size)
            return name
        value = said.read(size) if 0 <= size <= MAX_VALUE else b""
        if len(value) != size:
            raise ValueError(f"{len(value)} of the {size} bytes of {name!r}")
        if name == _END and self._listener is None:
            self.end(f"the trainer cut the group: {value.decode(errors='replace')}")
        elif name.startswith(_NCCL) and self._listener is not None:
            self.set(name, value)
        else:
            self._note(name, value)
        return name

    def _note(self, name: str, value: bytes) -> None:
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def start(self, tensors: Sequence[torch.Tensor]) -> list[Callable[[], object]]:
        """Start to broadcast tensors from rank 0, on every rank in the same order; contiguous, on `device`.

        Returns:
            The works for `wait`. The tensors must live until then.

        Raises:
            TransferError: the group was cut.
        """
        if self.spec.backend == "tcp":
            self._check()
            views = [tensor.view(torch.uint8).numpy().data for tensor in tensors if tensor.numel()]
            return [partial(self._receive if self._listener is None else self._send, views)]
        with self._or_cut("the broadcast broke"):
            if (backend := self._backend) is None:
                raise TransferError(f"group {self.spec.epoch} is not formed yet")
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            backend._start_coalescing()
            for tensor in tensors:
                backend.broadcast([tensor], options)
            return [backend._end_coalescing().wait]

    def wait(self, works: Sequence[Callable[[], object]]) -> None:
        """Let later work on this thread's stream see the tensors (NCCL), or transfer them. Raises as `start`."""
        with self._or_cut("the broadcast broke"):
            for work in works:
                work()

    def synchronize(self) -> None:
        """Wait until the device has done all of it. TransferError: the group was cut."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._check()

    def _send(self, views: Sequence[memoryview]) -> None:
        """Send to all members at once, so that a slow worker delays only itself."""

        def send(peer: socket.socket) -> None:
            for view in views:
                peer.sendall(_head(_TENSOR, len(view)))
                peer.sendall(view)

        with self._sends, ThreadPoolExecutor(max(1, len(self._peers))) as pool:
            self._check()
            self._in_tensor = True
            for _ in pool.map(send, self._peers):
                pass
            self._in_tensor = False

    def _receive(self, views: Sequence[memoryview]) -> None:
        with self._changed:
            self._targets.extend(views)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.cut is not None or not self._targets)
        self._check()

    def _fill(self, said: BinaryIO, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.cut is not None or self._targets)
            self._check()
            target = self._targets[0]
        if size != len(target) or said.readinto(target) != size:
            raise ValueError(f"the {len(target)} bytes of a tensor did not come")
        with self._changed:
            self._targets.popleft()
            self._changed.notify_all()

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Cut the group if the block takes longer. A hanging collective then returns."""
        timer = threading.Timer(seconds, self.end, (f"the broadcast took longer than {seconds:g} s",))
        timer.daemon = True
        timer.start()
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            timer.cancel()

    def end(self, why: str) -> None:
        """Cut the group. Every call that waits in it returns; on the trainer, the calls of all other ranks too."""
        with self._changed:
            if self.cut is not None:
                return
            self.cut = why
            backend, self._backend = self._backend, None
            peers = list(self._peers)
            self._changed.notify_all()
        if self._listener is not None:
            shut(self._listener)
            self._listener.close()
            reason = why.encode()[:MAX_VALUE]
            # Between two tensors a member receives the reason. Within a tensor it only sees the connection end.
            if not self._in_tensor and self._sends.acquire(blocking=False):
                for peer in peers:
                    with suppress(OSError):
                        peer.send(_head(_END, len(reason)) + reason, socket.MSG_DONTWAIT)
                self._sends.release()
        for peer in peers:
            shut(peer)
        if backend is not None:
            _start("penstock-abort", partial(_abort, backend))  # NCCL's kernels return at once

    def _check(self) -> None:
        if self.cut is not None:
            raise TransferError(self.cut)


# --- connections -----------------------------------------------------------------------------------------------------


def listen(address: str) -> socket.socket:
    """Listen for members at this address only. TransferError: this host cannot."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(4096)  # with a shorter queue, hundreds of workers lost connections
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {address!r} for engines: {error}; set fleet.weight_address") from error
    return listener


def _proves(connection: socket.socket, said: BinaryIO, key: str) -> bool:
    """Check that a member has the key. If so, prove that the trainer has it too."""
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    theirs = said.read(_NONCE)
    if not hmac.compare_digest(said.read(_PROOF), _proof(key, b"member", ours, theirs)):
        return False
    connection.sendall(_proof(key, b"trainer", ours, theirs))
    return True


def _prove(connection: socket.socket, said: BinaryIO, key: str) -> None:
    """Prove to the trainer that we have the key. ConnectionRefusedError: the other side does not have it."""
    theirs, ours = said.read(_NONCE), secrets.token_bytes(_NONCE)
    connection.sendall(ours + _proof(key, b"member", theirs, ours))
    if not hmac.compare_digest(said.read(_PROOF), _proof(key, b"trainer", theirs, ours)):
        address, port = connection.getpeername()[:2]
        raise ConnectionRefusedError(f"the listener at {address}:{port} does not have the group's key")


def _head(name: str, size: int) -> bytes:
    """Return the header of a value of `size` bytes."""
    return f"{name} {size}\n".encode()


def _proof(key: str, side: bytes, trainers: bytes, members: bytes) -> bytes:
    return hmac.digest(key.encode(), side + trainers + members, "sha256")


# --- NCCL ------------------------------------------------------------------------------------------------------------


class NcclStore(Store):
    """The store that NCCL uses, mainly for its unique id, over the members' authenticated connections."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def set(self, key: str, value: bytes | str) -> None:
        self._group.set(_NCCL + key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._group.get(_NCCL + key, self._group.spec.timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            return not self._group.missing([_NCCL + key for key in keys], 0.0)
        except TransferError:  # the group has ended
            return False


def _nccl(store: Store, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = _LONG
    with _nccl_env_lock:
        before = {name: os.environ.get(name) for name in _NCCL_ENV}
        os.environ.update(_NCCL_ENV)
        try:
            return c10d.ProcessGroupNCCL(store, rank, world_size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # an error of the aborted work does not matter
        backend.abort()


def _start(name: str, work: Callable[[], None]) -> None:
    """Run long work of torch in a thread. An ending process waits 5 s at most.

    If such a thread returns from torch while Python ends, it kills the whole process (`std::terminate`, SIGABRT; Python
    before 3.14). A trainer that has done its work would seem to have crashed.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _inside.add(thread)
    thread.start()


@atexit.register
def _wait_for_threads() -> None:
    until = time.monotonic() + 5.0
    for thread in list(_inside):
        thread.join(max(0.0, until - time.monotonic()))
