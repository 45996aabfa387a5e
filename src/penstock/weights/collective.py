"""One group of the trainer and the workers, beside whatever groups they have: formed, used within deadlines, cut.

`torch.distributed`'s own default group is left alone, since the trainer has one. Members meet at the trainer's keyed
port (`meeting.py`). It also tells every rank that the group has ended, and its own end says that the trainer is gone:
no rank waits in a collective for one that will not come.
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
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from penstock.errors import TransferError
from penstock.weights.group import GroupSpec
from penstock.weights.meeting import Meeting, Visit, receive_into, shut

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

_making = threading.Lock()

_EXIT_S = 5.0
_inside: WeakSet[threading.Thread] = WeakSet()
"""Threads that were started to call into torch."""


class Group:
    """One rank's part in one group; thread-safe. Every method that waits is blocking.

    Args:
        spec: the group.
        rank: of this process; 0 is the trainer's, which needs `meeting`.
        device: of the tensors.
        meeting: where the others find the trainer.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: torch.device, meeting: Meeting | None = None) -> None:
        self.spec = spec
        self.device = device
        self.ready = False
        self.cut: str | None = None
        """Why nothing more goes over it."""
        self.absent: tuple[int, ...] = ()
        """Ranks that did not come when `lead` could not form the group."""
        self._rank = rank
        self._meeting = meeting
        self._visits: list[Visit] = []
        self._store: Store | None = None
        """Kept for as long as the backend is: torch finds our methods by the Python object alone."""
        self._backend: Any = None
        self._changed = threading.Condition()

    # --- forming -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Form the group with all others; the trainer's call is `lead`.

        Raises:
            TransferError: it was not formed within the deadline, or was cut.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            visit = self._visit()
            threading.Thread(target=self._until_ended, name="penstock-group", daemon=True).start()
            visit.set(f"here/{self._rank}")
            visit.get(_GO, self.spec.timeout_s)
            self._connect(visit)
            visit.set(f"ready/{self._rank}")
        except (RuntimeError, OSError) as error:  # of the meeting, and torch's own
            self._not_formed(error)

    def lead(self) -> None:
        """Form the group as rank 0.

        Raises:
            TransferError: not everyone came within the deadline (then see `absent`), or it was cut.
        """
        meeting = self._meeting
        if meeting is None:
            raise TransferError("rank 0 of a group needs the port that it is formed at")
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._await(meeting, "here")
            meeting.set(_GO)
            self._connect(meeting)
            self._await(meeting, "ready")
        except (RuntimeError, OSError) as error:
            self._not_formed(error)

    def _not_formed(self, error: Exception) -> NoReturn:
        self._await_reason()
        self.end(f"group {self.spec.epoch} was not formed: {error}")
        raise TransferError(str(self.cut)) from error

    def _await(self, meeting: Meeting, step: str) -> None:
        ranks = {f"{step}/{rank}": rank for rank in range(1, self.spec.world_size)}
        missing = meeting.missing(list(ranks), self.spec.timeout_s)
        if missing:
            self.absent = tuple(ranks[name] for name in missing)
            raise TimeoutError(f"ranks {list(self.absent)} did not come within {self.spec.timeout_s:g} s ({step})")
        self._check()

    def _connect(self, store: Meeting | Visit) -> None:
        """Connect with the others within the deadline, or until the group is cut.

        NCCL knows no deadline for that, and nothing interrupts it where a rank hangs or cannot be reached: a thread
        does it that nobody waits for any more then.
        """
        over: list[BaseException | None] = []

        def connect() -> None:
            error: BaseException | None = None
            try:
                self._send_one(store)
            except BaseException as raised:  # noqa: BLE001 - it is for who waits
                error = raised
            with self._changed:
                over.append(error)
                self._changed.notify_all()

        with self.within(self.spec.timeout_s):
            _start("penstock-connect", connect)
            with self._changed:
                self._changed.wait_for(lambda: over or self.cut is not None)
        for error in over:
            if error is not None:
                raise error
        self._check()
        self.ready = True

    def _send_one(self, store: Meeting | Visit) -> None:
        """Make the backend and send one element over it: the first collective is what connects the ranks."""
        if self.spec.backend == "nccl":
            torch.cuda.set_device(self.device)  # of this thread
            self._store = _NcclStore(store, self.spec.timeout_s)
            backend = _nccl(self._store, self._rank, self.spec.world_size)
        else:
            backend = self._lines(store)
        with self._changed:
            self._check()
            self._backend = backend
        self.wait(self.start([torch.zeros(1, device=self.device)]))
        self.synchronize()

    def _lines(self, store: Meeting | Visit) -> _Lines:
        if isinstance(store, Visit):
            return _Lines([self._visit().line(self._rank)], receives=True)
        self._await(store, "line")
        return _Lines(store.lines(), receives=False)

    def _visit(self) -> Visit:
        visit = Visit(self.spec.address, self.spec.port, self.spec.key, self.spec.timeout_s)
        with self._changed:
            self._visits.append(visit)
            cut = self.cut
        if cut is not None:  # `end` may have gone over the list before
            visit.close()
            raise TransferError(cut)
        return visit

    # --- use ---------------------------------------------------------------------------------------------------------

    def start(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Begin to broadcast tensors from rank 0, on every rank in the same order; contiguous, on `device`.

        Returns:
            What to give `wait`. The tensors must live until then.

        Raises:
            TransferError: the group was cut.
        """
        backend = self._backend
        if self.cut is not None or backend is None:
            raise TransferError(self.cut or f"group {self.spec.epoch} is not formed yet")
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        if self.spec.backend == "tcp":
            return [(backend, tensors)]
        try:
            backend._start_coalescing()
            for tensor in tensors:
                backend.broadcast([tensor], options)
            return [backend._end_coalescing()]
        except RuntimeError as error:
            self.end(f"the broadcast broke: {error}")
            raise TransferError(str(self.cut)) from error

    def wait(self, works: Sequence[Any]) -> None:
        """Let what is queued next on this thread's stream see the tensors (NCCL), or carry them over (TCP).

        Raises:
            TransferError: the group was cut meanwhile.
        """
        self._check()
        try:
            for work in works:
                if self.spec.backend == "nccl":
                    work.wait()
                else:
                    lines, tensors = work
                    lines.carry(tensors)
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

    # --- end ---------------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Cut the group: whatever waits in it returns, here and, where this is the trainer, at every other rank."""
        with self._changed:
            if self.cut is not None:
                return
            self.cut = why
            backend, self._backend = self._backend, None
            self._changed.notify_all()
        if self._meeting is not None:
            self._meeting.end(why)  # the others learn it from the end of the connection as well
        if backend is not None:
            # NCCL's kernels return at once.
            _start("penstock-abort", lambda: _abort(backend))
        for visit in tuple(self._visits):
            visit.close()

    def _check(self) -> None:
        if self.cut is not None:
            raise TransferError(self.cut)

    def _await_reason(self) -> None:
        """Of a member whose connection broke: why the trainer cut the group, where it says so."""
        if self._meeting is None:
            with self._changed:
                self._changed.wait_for(lambda: self.cut is not None, _WHY_S)

    def _until_ended(self) -> None:
        why = "the trainer is gone"
        with suppress(OSError, TransferError):
            why = f"the trainer cut the group: {self._visit().until_ended()}"
        self.end(why)


class _Lines:
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
        """Side by side: a worker that is slow holds the others no longer than itself."""
        with selectors.DefaultSelector() as writable:
            for line in self._sockets:
                line.setblocking(False)  # noqa: FBT003 - the module's own signature
                writable.register(line, selectors.EVENT_WRITE, list(reversed(views)))
            while writable.get_map():
                for chosen, _ in writable.select():
                    line, left = cast("socket.socket", chosen.fileobj), cast("list[memoryview]", chosen.data)
                    if not left:
                        writable.unregister(line)
                        continue
                    with suppress(BlockingIOError):
                        left[-1] = left[-1][line.send(left[-1]) :]
                    if not left[-1]:
                        left.pop()

    def abort(self) -> None:
        """End the connections; whoever carries something over them gets an OSError."""
        for line in self._sockets:
            shut(line)
        with self._busy:
            for line in self._sockets:
                line.close()


class _NcclStore(Store):
    """What NCCL asks of a store, its unique id above all, over the members' keyed connections."""

    def __init__(self, meeting: Meeting | Visit, timeout_s: float) -> None:
        super().__init__()
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        with self._lock:
            self._meeting.set(f"nccl/{key}", value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._meeting.get(f"nccl/{key}", self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        del timeout
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        try:
            with self._lock:
                for key in keys:
                    self._meeting.get(f"nccl/{key}", 0.0)
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
    with _making:
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
