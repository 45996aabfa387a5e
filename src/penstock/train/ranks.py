"""The ranks of a learner: how they start, join as a group, and end. If one ends, the run ends.

`python -m penstock.train.ranks` is a rank other than 0. It runs until rank 0 stops or dies.
"""

# torch.distributed ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from penstock.config import TrainConfig
from penstock.errors import ConfigError, LearnerError, PenstockError
from penstock.fleet.gpus import visible_gpus
from penstock.lifeline import watch_lifeline
from penstock.process import ChildProcess
from penstock.train.interface import Learner
from penstock.train.learner import LocalLearner, ServedDtype
from penstock.train.ranked import RankedLearner, serve

log = logging.getLogger(__name__)
JOIN = timedelta(minutes=5)
"""Time for all ranks to join. With several nodes, people start them."""
COLLECTIVE = timedelta(minutes=10)
"""Time limit of one collective, against a rank that hangs. The death of a rank is noticed at once."""
IDLE = timedelta(days=365)
"""Time that a follower waits for a command. If rank 0 ends, the lost connection ends the wait at once."""
STOP_S = 10.0
"""Seconds for a rank to end by itself, and then again after SIGTERM."""
EXPLAIN_S = 10.0
"""Seconds between a failed collective and the end of the rank that explains it."""
ANSWER_S = 10.0
"""Seconds for a Ray cluster to accept a connection."""
POLL_S = 0.05
GPU = "gpu"
"""Key in the store for the GPU that a Ray cluster gave rank 0. Empty value: no GPU."""
T = TypeVar("T")


class Ranks:
    """The ranks other than rank 0, which is this process. An asynchronous context manager that ends them.

    Args:
        count: number of all ranks, including this one.
        log_dir: folder of the `rank-N.log` files.
        launched: torchrun's variables, if it started the others and ends them; else empty.
        ray_address: address of the Ray cluster that runs the others; None: they are processes of this machine.

    Raises:
        ConfigError: torchrun started another number of ranks.
    """

    def __init__(self, count: int, log_dir: Path, launched: Mapping[str, str], ray_address: str | None = None) -> None:
        self.count = int(launched.get("WORLD_SIZE", count))
        if count not in {1, self.count}:
            raise ConfigError(
                f"torchrun started {self.count} ranks and train.ranks is {count}: leave train.ranks out, or start "
                f"torchrun with {count} processes"
            )
        self._log_dir = log_dir
        self._launched = launched
        self._ray_address = ray_address
        self._children: list[ChildProcess] = []
        self._group: RankGroup | None = None
        self._learner: RankedLearner | None = None
        self._call: asyncio.Future[Any] | None = None
        """The call that runs in a thread now, and may wait there for the other ranks."""

    @property
    def pids(self) -> list[int]:
        """Process ids of this process and of those started here, by rank."""
        return [os.getpid(), *(child.pid for child in self._children)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the other ranks: by a command if they listen, else by a signal."""
        if self._learner is not None and (self._call is None or self._call.done()):
            with suppress(LearnerError):  # a rank is gone; the others are ended below
                await asyncio.to_thread(self._learner.stop)
                waits = [asyncio.create_task(child.wait()) for child in self._children]
                if waits:
                    await asyncio.wait(waits, timeout=STOP_S)
        await asyncio.gather(*(child.stop(STOP_S) for child in self._children))
        if self._call is not None and not self._call.done():
            await asyncio.to_thread(self._abort)
            await asyncio.wait((self._call,))
        if self._group is not None:
            self._group.close()

    async def load(
        self, model_path: str, config: TrainConfig, *, seed: int, served_dtype: ServedDtype = "float32"
    ) -> Learner:
        """Start and join the other ranks, and load the model on all of them.

        Raises:
            LearnerError: a rank ended, or did not join in time. The message has its last output.
            ConfigError: see `LocalLearner`.
        """
        given: dict[str, Any] = {"seed": seed, "served_dtype": served_dtype}
        if self.count == 1:
            return await asyncio.to_thread(LocalLearner, model_path, config, **given)
        self._group = await self._join()
        make = partial(RankedLearner, self._group, model_path, config, **given)
        self._learner = await self.during(self._in_thread(make))
        return self._learner

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. If a rank ends first, end `work` too.

        Raises:
            LearnerError: a rank ended; the message has its name, exit status and last output. Or the ranks lost each
                other although none ended, because one hangs; the message names the running ranks.
        """
        working = asyncio.create_task(work)
        ends = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait((working, *ends), return_when=asyncio.FIRST_COMPLETED)
            if ends and (working not in done or isinstance(working.exception(), LearnerError)):
                # The connection to a dying rank closes before the rank ends.
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=EXPLAIN_S)
                ended = [(child, task.result()) for task, child in ends.items() if task.done()]
                if ended:
                    await asyncio.to_thread(self._abort)
                    raise _lost(*ended[0])
                if working in done:
                    running = ", ".join(f"{child.name} (pid {child.pid})" for child in self._children)
                    raise LearnerError(f"{working.exception()}; still running: {running}") from working.exception()
            return await working
        finally:
            for task in (working, *ends):
                task.cancel()
            if not (await asyncio.wait((working,), timeout=STOP_S))[0]:  # its step waits for a rank that hangs
                log.warning("a step of the learner did not end within %g s: its ranks are ended", STOP_S)
                await asyncio.gather(*(child.stop(STOP_S) for child in self._children))
                await asyncio.to_thread(self._abort)
            await asyncio.wait((working, *ends))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run a call that waits for other ranks in a thread. `__aexit__` waits for the thread's end."""
        self._call = asyncio.get_running_loop().run_in_executor(None, call)
        return await asyncio.shield(self._call)

    def _abort(self) -> None:
        """End calls that wait for a lost rank."""
        if self._group is not None:
            self._group.abort()

    async def _join(self) -> RankGroup:
        if self._launched:
            return await self._in_thread(lambda: RankGroup(self._launched))
        ray = self._ray_address
        address = "127.0.0.1" if ray is None else await asyncio.to_thread(address_towards, ray)
        store, port = meeting_point(address)
        await (self._start_here(port) if ray is None else self._start_by_ray(ray, address, port))
        log.info("ranks of the learner: %d, pids %s", self.count, self.pids)
        # Joining is fast once the others have imported torch, so a rank that cannot start is reported soon.
        await self.during(wait_ready(store, self.count))
        gpu = store.get(GPU).decode() if ray is not None else ""  # set before any rank was ready
        variables = self._variables(0, port)
        if ray is not None:
            variables |= {"LOCAL_RANK": str(visible_gpus().index(gpu) if gpu else 0), "LOCAL_WORLD_SIZE": "1"}
        return await self.during(self._in_thread(lambda: RankGroup(variables, store)))

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """Return what torchrun would tell a rank of this host."""
        place = {"RANK": rank, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count, "MASTER_PORT": port}
        return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}

    async def _start_here(self, port: int) -> None:
        for rank in range(1, self.count):
            child = await ChildProcess.start(
                [sys.executable, "-m", "penstock.train.ranks"],
                name=f"rank {rank}",
                log=self._log_dir / f"rank-{rank}.log",
                env=self._variables(rank, port),
            )
            self._children.append(child)

    async def _start_by_ray(self, cluster: str, address: str, port: int) -> None:
        from penstock.train.ray_ranks import Options  # noqa: PLC0415 - a side room

        gpus = torch.cuda.is_available()
        options = Options(
            address=cluster, size=self.count, master=(address, port), log_dir=self._log_dir.absolute(), gpus=gpus
        )
        argv = [sys.executable, "-m", "penstock.train.ray_ranks", options.model_dump_json()]
        log_file = self._log_dir / "ray-ranks.log"
        self._children.append(await ChildProcess.start(argv, name="the process that drives Ray", log=log_file))


def _lost(child: ChildProcess, status: int) -> LearnerError:
    lines = child.said().strip().splitlines()
    return LearnerError(
        f"{child.name} of the learner (pid {child.pid}) ended with status {status}; it said last: "
        f"{lines[-1] if lines else 'nothing'} ({child.log}). Go on from the last checkpoint with --resume"
    )


# --- where they meet -------------------------------------------------------------------------------------------------


def meeting_point(address: str) -> tuple[dist.Store, int]:
    """Return a store that listens at one address of this host, and its port."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # without the descriptor, it would listen on all addresses
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return _of_attempt(store), port


def store_at(address: str, port: int) -> dist.Store:
    """Connect from another process to the store that `meeting_point` made."""
    return _of_attempt(dist.TCPStore(address, port, is_master=False))


def _store_of(variables: Mapping[str, str]) -> dist.Store:
    """Join the store that a rank's variables name, and say there that this rank is ready."""
    rank, address, port = int(variables["RANK"]), variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    hosts = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        given = dist.TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=JOIN)
    except RuntimeError as error:  # DistNetworkError among others
        raise ConfigError(f"rank {rank} cannot reach rank 0 at {address}:{port}: {error}") from error
    store = _of_attempt(given, variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store.set(_ready(rank), "here")
    return store


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


def _of_attempt(store: dist.Store, attempt: str = "0") -> dist.Store:
    return dist.PrefixStore(f"penstock/{attempt}", store)


def _ready(rank: int) -> str:
    return f"ready/{rank}"


# --- the group -------------------------------------------------------------------------------------------------------


class RankGroup:
    """This process as a member of the ranks. A process can be in one group at a time.

    `variables` are torchrun's, or those of `Ranks` for a child. `store`: the one where the ranks meet; None: join it.

    If all ranks are on one host, their traffic uses the loopback device. `gloo` is the ranks' gloo group, on any
    device; `COLLECTIVE` limits each wait in it. Commands travel as pickles, as torch's own objects do in a checkpoint.

    Raises:
        ConfigError: nothing answers at the address, or there are too few GPUs.
        LearnerError: the other ranks did not join in time.
    """

    def __init__(self, variables: Mapping[str, str], store: dist.Store | None = None) -> None:
        self.rank, self.size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank = int(variables.get("LOCAL_RANK", self.rank))  # it selects the GPU
        store = store or _store_of(variables)
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            if local_rank >= torch.cuda.device_count():
                raise ConfigError(
                    f"rank {self.rank} needs a GPU of its own and there are {torch.cuda.device_count()}: ask for "
                    "fewer train.ranks"
                )
            torch.cuda.set_device(self.device)
        try:
            with _loopback() if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"] else nullcontext():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if cuda else "gloo",
                    store=store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=COLLECTIVE,
                )
                self.gloo: Any = dist.new_group(backend="gloo", timeout=COLLECTIVE)
                self._commands: Any = dist.new_group(backend="gloo", timeout=IDLE if self.rank else COLLECTIVE)
        except RuntimeError as error:
            raise LearnerError(f"rank {self.rank} of {self.size} could not join the others: {error}") from error

    def tell(self, command: object) -> None:
        """Send a command to every other rank; called on rank 0."""
        dist.broadcast_object_list([command], src=0, group=self._commands)

    def hear(self) -> Any:
        """Wait up to `IDLE` for the next command; called on the other ranks."""
        heard = [None]
        dist.broadcast_object_list(heard, src=0, group=self._commands)
        return heard[0]

    def exchange(self, value: T) -> Sequence[T]:
        """Return the values of all ranks, by rank; called on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.gloo)
        return values

    def abort(self) -> None:
        """End collectives that wait for a lost rank. gloo's end by themselves, NCCL's never do."""
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - no public one

    def close(self) -> None:
        """Leave the group. The process may then join another one."""
        if dist.is_initialized():
            dist.destroy_process_group()


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


# --- the other ranks -------------------------------------------------------------------------------------------------


def follow(variables: Mapping[str, str], failed: Callable[[str], object] = bool) -> int:
    """Follow rank 0's commands until the end, and return the exit status. `variables` are torchrun's, or ours."""
    try:
        group = RankGroup(variables)
        serve(group)
    except (PenstockError, RuntimeError) as error:  # RuntimeError from torch: a lost peer, or no memory left
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        failed(message)
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for collectives that never end
    group.close()
    return 0


if __name__ == "__main__":
    watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(follow(os.environ))
