"""One group of the trainer and the workers, beside the process groups that they have: formed, used, cut.

`torch.distributed`'s own default group is left alone, since the trainer has one. Members meet at the trainer's keyed
port (`group.py`). It also tells every rank that the group has ended, and its own end says that the trainer is gone: no
rank waits in a collective for one that will not come.
"""
# ruff: noqa: SLF001 - torch names with an underscore what its own init_process_group makes groups of
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from penstock.errors import TransferError
from penstock.guard import shut
from penstock.weights.group import GroupSpec, Rendezvous, RendezvousClient, receive_into

_GO = "go"
_WHY_S = 2.0
"""Seconds in which a member learns why the group ended, where its connection for weights broke first."""
_LONG = timedelta(days=1)
"""For torch's own deadlines, which end the process or leave it hanging; ours are kept by timers that cut the group."""
_NCCL_ENV = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read by ProcessGroupNCCL's constructor (torch 2.11 to 2.13): by default its watchdog ends the process when a peer
dies, and a thread of it asks the store every second, also while Python ends. Set only while ours is made: other groups
of the process keep what they have."""
_nccl_env_lock = threading.Lock()
_EXIT_S = 5.0
_inside: WeakSet[threading.Thread] = WeakSet()
"""Threads that were started to call into torch."""


class Group:
    """One rank's part in one group; thread-safe. Every method that waits is blocking.

    Args:
        spec: the group.
        rank: of this process; 0 is the trainer's, which needs `rendezvous`.
        device: of the tensors.
        rendezvous: where the others find the trainer.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: torch.device, rendezvous: Rendezvous | None = None) -> None:
        self.spec = spec
        self.device = device
        self.ready = False
        self.cut: str | None = None
        """Why nothing more goes over it."""
        self.absent: tuple[int, ...] = ()
        """Ranks that did not come when `lead` could not form the group."""
        self._rank = rank
        self._rendezvous = rendezvous
        self._clients: list[RendezvousClient] = []
        self._store: Store | None = None
        """Kept for as long as the backend is: torch finds our methods by the Python object alone."""
        self._backend: Any = None
        self._changed = threading.Condition()

    def join(self) -> None:
        """Form the group with all others; the trainer's call is `lead`.

        Raises:
            TransferError: it was not formed within the deadline, or was cut.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            client = self._connect_client()
            threading.Thread(target=self._until_ended, name="penstock-group", daemon=True).start()
            client.set(f"here/{self._rank}")
            client.get(_GO, self.spec.timeout_s)
            self._connect(client)
            client.set(f"ready/{self._rank}")
        except (RuntimeError, OSError) as error:  # of the rendezvous, and torch's own
            self._not_formed(error)

    def lead(self) -> None:
        """Form the group as rank 0.

        Raises:
            TransferError: a rank did not come within the deadline (then see `absent`), or it was cut.
        """
        if self._rendezvous is None:
            raise TransferError("rank 0 of a group needs the port that it is formed at")
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._await_all(self._rendezvous, "here")
            self._rendezvous.set(_GO)
            self._connect(self._rendezvous)
            self._await_all(self._rendezvous, "ready")
        except (RuntimeError, OSError) as error:
            self._not_formed(error)

    def _not_formed(self, error: Exception) -> NoReturn:
        self._await_reason()
        self.end(f"group {self.spec.epoch} was not formed: {error}")
        raise TransferError(str(self.cut)) from error

    def _await_all(self, rendezvous: Rendezvous, step: str) -> None:
        ranks = {f"{step}/{rank}": rank for rank in range(1, self.spec.world_size)}
        if missing := rendezvous.missing(list(ranks), self.spec.timeout_s):
            self.absent = tuple(ranks[name] for name in missing)
            raise TimeoutError(f"ranks {list(self.absent)} did not come within {self.spec.timeout_s:g} s ({step})")
        self._check()

    def _connect(self, store: Rendezvous | RendezvousClient) -> None:
        """Connect with the others within the deadline, or until the group is cut.

        NCCL has no deadline for that, and nothing interrupts it where a rank hangs or cannot be reached. So a thread
        does it, which is then left alone.
        """
        over: list[Exception | None] = []

        def connect() -> None:
            error: Exception | None = TransferError("connecting ended with an unforeseen error; see the log")
            try:
                self._broadcast_one(store)
                error = None
            except (RuntimeError, OSError, TransferError) as raised:
                error = raised
            finally:
                with self._changed:
                    over.append(error)
                    self._changed.notify_all()

        with self.within(self.spec.timeout_s):
            _start("penstock-connect", connect)
            with self._changed:
                self._changed.wait_for(lambda: over or self.cut is not None)
        if over and over[0] is not None:
            raise over[0]
        self._check()
        self.ready = True

    def _broadcast_one(self, store: Rendezvous | RendezvousClient) -> None:
        """Make the backend and send one element over it: the first collective is what connects the ranks."""
        if self.spec.backend == "nccl":
            torch.cuda.set_device(self.device)  # of this thread
            self._store = _NcclStore(store, self.spec.timeout_s)
            backend = _nccl(self._store, self._rank, self.spec.world_size)
        else:
            backend = self._tcp(store)
        with self._changed:
            self._check()
            self._backend = backend
        self.wait(self.start([torch.zeros(1, device=self.device)]))
        self.synchronize()

    def _tcp(self, store: Rendezvous | RendezvousClient) -> _TcpBackend:
        if isinstance(store, RendezvousClient):
            return _TcpBackend([self._connect_client().stream(self._rank)], receives=True)
        self._await_all(store, "stream")
        return _TcpBackend(store.streams(), receives=False)

    def _connect_client(self) -> RendezvousClient:
        client = RendezvousClient(self.spec.address, self.spec.port, self.spec.key, self.spec.timeout_s)
        with self._changed:
            self._clients.append(client)
            cut = self.cut
        if cut is not None:  # `end` may have gone over the list before
            client.close()
            raise TransferError(cut)
        return client

    def start(self, tensors: Sequence[torch.Tensor]) -> list[Callable[[], object]]:
        """Begin to broadcast tensors from rank 0, on every rank in the same order; contiguous, on `device`.

        Returns:
            What to give `wait`. The tensors must live until then.

        Raises:
            TransferError: the group was cut.
        """
        backend = self._backend
        if self.cut is not None or backend is None:
            raise TransferError(self.cut or f"group {self.spec.epoch} is not formed yet")
        if self.spec.backend == "tcp":
            return [partial(backend.carry, tensors)]
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        try:
            backend._start_coalescing()
            for tensor in tensors:
                backend.broadcast([tensor], options)
            return [backend._end_coalescing().wait]
        except RuntimeError as error:
            self.end(f"the broadcast broke: {error}")
            raise TransferError(str(self.cut)) from error

    def wait(self, works: Sequence[Callable[[], object]]) -> None:
        """Let what is queued next on this thread's stream see the tensors (NCCL), or carry them over (TCP).

        Raises:
            TransferError: the group was cut meanwhile.
        """
        self._check()
        try:
            for work in works:
                work()
        except (RuntimeError, OSError) as error:
            self._await_reason()
            self.end(f"the broadcast broke: {error}")
            raise TransferError(str(self.cut)) from error

    def synchronize(self) -> None:
        """Wait until all of it has happened on the device. Raises TransferError where the group was cut meanwhile."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._check()

    @contextmanager
    def within(self, seconds: float) -> Generator[None]:
        """Cut the group if what is done under this takes longer; a collective that hangs returns then."""
        timer = threading.Timer(seconds, self.end, (f"the broadcast took longer than {seconds:g} s",))
        timer.daemon = True
        timer.start()
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            timer.cancel()

    def end(self, why: str) -> None:
        """Cut the group: whatever waits in it returns, here and, where this is the trainer, at every other rank."""
        with self._changed:
            if self.cut is not None:
                return
            self.cut = why
            backend, self._backend = self._backend, None
            self._changed.notify_all()
        if self._rendezvous is not None:
            self._rendezvous.end(why)  # the others learn it from the end of the connection as well
        if backend is not None:
            _start("penstock-abort", partial(_abort, backend))  # NCCL's kernels return at once
        for client in tuple(self._clients):
            client.close()

    def _check(self) -> None:
        if self.cut is not None:
            raise TransferError(self.cut)

    def _await_reason(self) -> None:
        """Let a member whose connection broke learn why the trainer cut the group, where it says so."""
        if self._rendezvous is None:
            with self._changed:
                self._changed.wait_for(lambda: self.cut is not None, _WHY_S)

    def _until_ended(self) -> None:
        why = "the trainer is gone"
        with suppress(OSError, TransferError):
            why = f"the trainer cut the group: {self._connect_client().until_ended()}"
        self.end(why)


class _TcpBackend:
    """One connection between the trainer and each worker: tensors of host memory, in order.

    Args:
        sockets: of a worker, the one to the trainer.
        receives: this is a worker.
    """

    def __init__(self, sockets: Sequence[socket.socket], *, receives: bool) -> None:
        self._sockets = sockets
        self._receives = receives
        self._busy = threading.Lock()

    def carry(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send all of them to every worker, or receive them. Raises OSError where a connection breaks."""
        views = [tensor.view(torch.uint8).numpy().data for tensor in tensors if tensor.numel()]
        with self._busy:
            if self._receives:
                for view in views:
                    receive_into(self._sockets[0], view)
            else:
                self._send(views)

    def _send(self, views: Sequence[memoryview]) -> None:
        """Send to all at once: a worker that is slow holds the others no longer than itself."""
        with selectors.DefaultSelector() as writable:
            for connection in self._sockets:
                connection.setblocking(False)  # noqa: FBT003 - the module's own signature
                writable.register(connection, selectors.EVENT_WRITE, list(reversed(views)))
            while writable.get_map():
                for chosen, _ in writable.select():
                    connection, left = cast("socket.socket", chosen.fileobj), cast("list[memoryview]", chosen.data)
                    if not left:
                        writable.unregister(connection)
                        continue
                    with suppress(BlockingIOError):
                        left[-1] = left[-1][connection.send(left[-1]) :]
                    if not left[-1]:
                        left.pop()

    def abort(self) -> None:
        """End the connections; a thread that carries something over them gets an OSError."""
        for connection in self._sockets:
            shut(connection)
        with self._busy:
            for connection in self._sockets:
                connection.close()


class _NcclStore(Store):
    """What NCCL asks of a store, its unique id above all, over the members' keyed connections."""

    def __init__(self, rendezvous: Rendezvous | RendezvousClient, timeout_s: float) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        with self._lock:
            self._rendezvous.set(f"nccl/{key}", value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._rendezvous.get(f"nccl/{key}", self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            with self._lock:
                for key in keys:
                    self._rendezvous.get(f"nccl/{key}", 0.0)
        except (OSError, TransferError):  # not there in time, or over
            return False
        return True


def _start(name: str, work: Callable[[], None]) -> None:
    """Let a thread do what may take long inside torch, and let the process that ends wait for it, but not for long.

    A thread that comes back from there while Python ends takes the whole process along (`std::terminate`, SIGABRT;
    Python before 3.14): a trainer that has done its work would end as one that crashed.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    _inside.add(thread)
    thread.start()


@atexit.register
def _wait_for_threads() -> None:
    until = time.monotonic() + _EXIT_S
    for thread in list(_inside):
        thread.join(max(0.0, until - time.monotonic()))


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):  # what it was doing; it is over
        backend.abort()


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
