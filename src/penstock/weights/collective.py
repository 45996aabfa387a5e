"""One group of the trainer and the workers, beside whatever groups they have: formed, used within deadlines, cut.

`torch.distributed`'s own default group is left alone, since the trainer has one. Who forms the group meets at a
`TCPStore` of the trainer's; the same store tells every rank that the group has ended, also where the trainer's process
is gone, so that nobody waits in a collective for somebody who will not come.
"""
# ruff: noqa: SLF001 - torch names with an underscore what its own init_process_group makes groups of
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from penstock.errors import TransferError
from penstock.weights.group import GroupSpec

_ENDED, _GO = "ended", "go"
_LONG = timedelta(days=1)
"""For torch's own deadlines, which end the process or leave it hanging; ours are kept by timers that cut the group."""

_NCCL_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Read by ProcessGroupNCCL's constructor (torch 2.11 to 2.13): by default its watchdog ends the process when a peer
dies. Set only while ours is made: other groups of the process keep what they have."""

_making = threading.Lock()

_EXIT_S = 5.0
_inside: WeakSet[threading.Thread] = WeakSet()
"""Threads that were started to call into torch."""


class Group:
    """One rank's part in one group; thread-safe. Every method that waits is blocking.

    Args:
        spec: the group.
        rank: of this process; 0 is the trainer's, which needs `host`.
        device: of the tensors.
        host: the store, at rank 0.
    """

    def __init__(self, spec: GroupSpec, rank: int, device: torch.device, host: TCPStore | None = None) -> None:
        self.spec = spec
        self.device = device
        self.ready = False
        self.cut: str | None = None
        """Why nothing more goes over it."""
        self.absent: tuple[int, ...] = ()
        """Ranks that did not come when `lead` could not form the group."""
        self._rank = rank
        self._store = host
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
            self._store = store = self._client()
            threading.Thread(target=self._until_ended, name="penstock-group", daemon=True).start()
            store.set(f"here/{self._rank}", "")
            store.wait([_GO], timedelta(seconds=self.spec.timeout_s))
            self._connect(store)
            store.set(f"ready/{self._rank}", "")
        except (RuntimeError, OSError) as error:  # torch's own, of store and backend
            self.end(f"group {self.spec.epoch} was not formed: {error}")
            raise TransferError(str(self.cut)) from error

    def lead(self) -> None:
        """Form the group as rank 0.

        Raises:
            TransferError: not everyone came within the deadline (then see `absent`), or it was cut.
        """
        store = self._store
        if store is None:
            raise TransferError("rank 0 of a group needs the store that it is formed at")
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._await(store, "here")
            store.set(_GO, "")
            self._connect(store)
            self._await(store, "ready")
        except (RuntimeError, OSError) as error:
            self.end(f"group {self.spec.epoch} was not formed: {error}")
            raise TransferError(str(self.cut)) from error

    def _await(self, store: TCPStore, step: str) -> None:
        keys = [f"{step}/{rank}" for rank in range(1, self.spec.world_size)]
        try:
            store.wait(keys, timedelta(seconds=self.spec.timeout_s))
        except c10d.DistStoreError:
            self.absent = tuple(rank for rank, key in enumerate(keys, start=1) if not store.check([key]))
            raise
        self._check()

    def _connect(self, store: TCPStore) -> None:
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

    def _send_one(self, store: TCPStore) -> None:
        """Make the backend and send one element over it: the first collective is what connects the ranks."""
        prefixed = PrefixStore("penstock", store)
        if self.spec.backend == "nccl":
            torch.cuda.set_device(self.device)  # of this thread
            backend = _nccl(prefixed, self._rank, self.spec.world_size)
        else:
            backend = _gloo(prefixed, self._rank, self.spec)
        with self._changed:
            self._check()
            self._backend = backend
        self.wait(self.start([torch.zeros(1, device=self.device)]))
        self.synchronize()

    def _client(self) -> TCPStore:
        return TCPStore(
            self.spec.address,
            self.spec.port,
            None,
            is_master=False,
            timeout=timedelta(seconds=self.spec.timeout_s),
            wait_for_workers=False,
        )

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
        try:
            if self.spec.backend == "nccl":
                backend._start_coalescing()
                for tensor in tensors:
                    backend.broadcast([tensor], options)
                return [backend._end_coalescing()]
            return [backend.broadcast([tensor], options) for tensor in tensors]
        except RuntimeError as error:
            self.end(f"the broadcast broke: {error}")
            raise TransferError(str(self.cut)) from error

    def wait(self, works: Sequence[Any]) -> None:
        """Let what is queued next on this thread's stream see the tensors (NCCL), or wait until they are here (gloo).

        Raises:
            TransferError: the group was cut meanwhile.
        """
        try:
            if self.spec.backend == "gloo":
                # Gloo cannot be interrupted; whoever waits for it can.
                for work in works:
                    work.get_future().add_done_callback(self._wake)
                with self._changed:
                    self._changed.wait_for(lambda: self.cut or all(w.get_future().done() for w in works))
            self._check()
            for work in works:
                work.wait()
        except RuntimeError as error:
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
        if self._rank == 0:
            with suppress(RuntimeError):  # they learn it from the end of the store as well
                store = self._client()  # the other connection is busy where `lead` waits
                store.set(_ENDED, why)
                for rank in range(1, self.spec.world_size):  # so that `lead` waits for nobody any more
                    store.set(f"here/{rank}", "")
                    store.set(f"ready/{rank}", "")
        if backend is not None:
            # NCCL's kernels return at once. Gloo ends what it has begun within its deadline, and its destructor waits.
            _start("penstock-abort", lambda: _abort(backend))

    def _check(self) -> None:
        if self.cut is not None:
            raise TransferError(self.cut)

    def _wake(self, _: Any) -> None:
        with self._changed:
            self._changed.notify_all()

    def _until_ended(self) -> None:
        why = "the trainer is gone"
        with suppress(RuntimeError):
            own = self._client()  # a store's connection is busy while it waits
            while not own.check([_ENDED]):
                with suppress(c10d.DistStoreError):  # the wait was too long; a store that is gone is another error
                    own.wait([_ENDED], _LONG)
            why = f"the trainer cut the group: {own.get(_ENDED).decode(errors='replace')}"
        self.end(why)


def host(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on `address` alone, and its port. `TCPStore` by itself listens on every address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen on {address!r} for engines: {error}; set fleet.weight_address") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


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


def _nccl(store: PrefixStore, rank: int, world_size: int) -> Any:
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


def _gloo(store: PrefixStore, rank: int, spec: GroupSpec) -> Any:
    # The address by which this host reaches the trainer: gloo's own choice is the host's name, which may lead anywhere.
    with socket.create_connection((spec.address, spec.port), timeout=spec.timeout_s) as probe:
        own = str(probe.getsockname()[0])
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=spec.timeout_s)
    options._threads = 2
    return c10d.ProcessGroupGloo(store, rank, spec.world_size, options)
