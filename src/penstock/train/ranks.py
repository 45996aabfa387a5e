"""The ranks of a sharded learner: rank 0 starts the others, and ends the run if one ends.

`python -m penstock.train.ranks` is one of the others. It runs until rank 0 stops or dies.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.errors import ConfigError, LearnerError, PenstockError
from penstock.fleet.gpus import visible_gpus
from penstock.process import ChildProcess, watch_lifeline

if TYPE_CHECKING:
    from penstock.train.rank_group import RankGroup
    from penstock.train.ranked import RankedLearner

log = logging.getLogger(__name__)
STOP_S = 10.0
"""Seconds for a rank to end by itself, and then again after SIGTERM."""
EXPLAIN_S = 10.0
"""Seconds between a failed collective and the end of the rank that explains it."""
_NEEDED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES = _NEEDED | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
"""Names and prefixes of the variables that torchrun sets."""
T = TypeVar("T")


class Ranks:
    """The ranks other than rank 0, which is this process. An asynchronous context manager that ends them.

    Args:
        count: number of all ranks, including this one.
        log_dir: folder of the `rank-N.log` files.
        launched: torchrun's variables (`take_launched`): the others already run, and torchrun ends them.
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
        listening = self._learner is not None and (self._call is None or self._call.done())
        if self._learner is not None and listening:
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

    async def load(self, make: Callable[[RankGroup], RankedLearner]) -> RankedLearner:
        """Start and join the other ranks, and make all of them load the model.

        Raises:
            LearnerError: a rank ended, or did not join in time. The message has its last output.
            PenstockError: see `make`.
        """
        self._group = await (self._in_thread(self._join_launched) if self._launched else self._start_and_join())
        self._learner = await self.during(self._in_thread(make, self._group))
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

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that waits for other ranks in a thread. `__aexit__` waits for the thread's end."""
        self._call = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *arguments))
        return await asyncio.shield(self._call)

    def _abort(self) -> None:
        """End calls that wait for a lost rank."""
        if self._group is not None:
            self._group.abort()

    def _join_launched(self) -> RankGroup:
        from penstock.train.rank_group import RankGroup, place_of  # noqa: PLC0415 - torch takes seconds

        return RankGroup(place_of(self._launched), one_host=on_one_host(self._launched))

    async def _start_and_join(self) -> RankGroup:
        from penstock.train import rank_group  # noqa: PLC0415 - torch takes seconds

        ray = self._ray_address
        address = rank_group.LOOPBACK if ray is None else await asyncio.to_thread(rank_group.address_towards, ray)
        store, port = rank_group.meeting_point(address)
        await (self._start_here(port) if ray is None else self._start_by_ray(ray, address, port))
        log.info("ranks of the learner: %d, pids %s", self.count, self.pids)
        # Joining is fast once the others have imported torch, so a rank that cannot start is reported soon.
        await self.during(rank_group.wait_ready(store, self.count))
        gpu = store.get(rank_group.GPU).decode() if ray is not None else ""  # set before any rank was ready
        place = rank_group.Place(0, self.count, visible_gpus().index(gpu) if gpu else 0, store)
        return await self.during(self._in_thread(functools.partial(rank_group.RankGroup, place, one_host=ray is None)))

    async def _start_here(self, port: int) -> None:
        for rank in range(1, self.count):
            place = {"RANK": rank, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count, "MASTER_PORT": port}
            child = await ChildProcess.start(
                [sys.executable, "-m", "penstock.train.ranks"],
                name=f"rank {rank}",
                log=self._log_dir / f"rank-{rank}.log",
                env={"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}},
            )
            self._children.append(child)

    async def _start_by_ray(self, cluster: str, address: str, port: int) -> None:
        import torch  # noqa: PLC0415 - seconds

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


# --- torchrun's variables, and the other ranks -----------------------------------------------------------------------


def take_launched(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Take torchrun's variables out of the environment; empty if torchrun did not start this process.

    Engines start with the remaining variables. With torchrun's, vLLM would take itself for a rank of the learner.
    """
    if not environment.keys() >= _NEEDED:
        return {}
    ours = [name for name in environment if name in _NAMES or name.startswith(_PREFIXES)]
    return {name: environment.pop(name) for name in ours}


def on_one_host(launched: Mapping[str, str]) -> bool:
    """Whether all ranks were started on this host."""
    return launched.get("LOCAL_WORLD_SIZE") == launched["WORLD_SIZE"]


def report_failure(launched: Mapping[str, str], message: str) -> None:
    """Make torchrun show why this process ended, at the end of its output."""
    if file := launched.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": shown}}))


def follow(place: Mapping[str, str], *, one_host: bool) -> int:
    """Follow rank 0's commands until the end, and return the exit status. `place` has torchrun's variables."""
    # Importing torch takes seconds.
    from penstock.train.rank_group import RankGroup, place_of  # noqa: PLC0415
    from penstock.train.ranked import serve  # noqa: PLC0415

    try:
        group = RankGroup(place_of(place), one_host=one_host)
        serve(group)
    except (PenstockError, RuntimeError) as error:  # RuntimeError from torch: a lost peer, or no memory left
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        report_failure(place, message)
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for collectives that never end
    group.close()
    return 0


if __name__ == "__main__":
    watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(follow(os.environ, one_host=on_one_host(os.environ)))
