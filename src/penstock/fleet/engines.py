"""Engine processes that this fleet starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from penstock.aio import all_or_first_error
from penstock.engine.control import ControlClient
from penstock.engine.launch import EngineProcess, ServerCommand
from penstock.errors import DeadlineError, EngineStartError, PenstockError, StateError
from penstock.fleet.lifecycle import SERVABLE, Lifecycle, State
from penstock.fleet.member import EngineHandle, Member

CONNECT_S = 15.0
"""Deadline of the first question to an engine, so that a hung one does not take an update's time."""


class LaunchedEngines:
    """Starts and restarts engines as children of this process, and ends all of them.

    `ray_engines.RayLauncher` starts them elsewhere. An engine keeps its GPUs or placement group from its first start to
    its end, through its deaths. Engines require `api_key`. Each appends to a file of its name in `log_dir`. SIGKILL
    follows SIGTERM after `stop_timeout_s` seconds. `place` chooses GPUs for one more engine beside those that are
    taken; ConfigError: there is no room.
    """

    def __init__(
        self,
        command: Callable[[], ServerCommand],
        place: Callable[[Sequence[Sequence[str]]], tuple[str, ...]],
        *,
        api_key: str | None,
        log_dir: Path,
        parallel_starts: int,
        control_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self.place = place
        self.api_key = api_key
        self.log_dir = log_dir.absolute()
        self._command = command
        self._limit = asyncio.Semaphore(parallel_starts)
        self._control_s = control_timeout_s
        self._stop_s = stop_timeout_s
        self._processes: dict[Lifecycle, EngineHandle] = {}
        self.lives: set[Lifecycle] = set()
        """Every engine so far."""
        self.taken: dict[Lifecycle, Sequence[str]] = {}
        """GPUs of each engine until it has ended; those of one that outlives SIGKILL stay here."""
        self._controls: dict[Lifecycle, ControlClient] = {}
        self._closed = False

    async def launch(self, name: str, gpus: Sequence[str]) -> EngineHandle:
        """Start a server that sees `gpus`; return when it is ready. Raises PenstockError."""
        return await EngineProcess.launch(self._command(), name=name, log_dir=self.log_dir, gpus=gpus)

    async def release(self, name: str) -> None:
        """Free the resources of an engine that has ended for good; GPUs here need nothing."""

    async def close(self) -> None:
        """Free what the launcher itself holds, after every engine has ended."""

    async def start(self, lifecycle: Lifecycle, gpus: Sequence[str]) -> Member:
        """Start the engine of `lifecycle`, which is LAUNCHING; it is SYNCING afterwards.

        If cancelled, it leaves no process; `end` frees the engine's resources.

        Raises:
            PenstockError: it did not start; its process was killed, and it is DEAD.
            StateError: the fleet has ended all engines.
        """
        self.lives.add(lifecycle)
        self.taken[lifecycle] = gpus
        async with AsyncExitStack() as failed:
            try:
                member = await self._started(lifecycle, gpus, failed)
            except PenstockError as error:
                if lifecycle.state is not State.DEAD:
                    lifecycle.to(State.DEAD, str(error))
                raise
            failed.pop_all()
        member.gpus = tuple(gpus)
        member.again = partial(self.start, lifecycle, gpus)
        return member

    async def _started(self, lifecycle: Lifecycle, gpus: Sequence[str], failed: AsyncExitStack) -> Member:
        async with self._limit:
            self._check_open()
            try:
                if (old := self._processes.get(lifecycle)) is not None and (left := await old.stop(0.0)):
                    what = f"processes {left} of its last start outlive SIGKILL, and may hold its GPUs"
                    raise EngineStartError(what, engine=lifecycle.engine)
                process = await self.launch(lifecycle.engine, gpus)
            except OSError as error:  # no memory, descriptor or disk space is left; that may pass
                what = f"no process can be started for it: {error}"
                raise EngineStartError(what, engine=lifecycle.engine) from error
            failed.push_async_callback(process.stop, 0.0)
            self._check_open()  # `end_all` does not know this process yet
            self._processes[lifecycle] = process
            member = await connect_engine(
                lifecycle, process.url, api_key=self.api_key, control_timeout_s=self._control_s, process=process
            )
            self._controls[lifecycle] = member.control
            return member

    async def end(self, lifecycle: Lifecycle) -> None:
        """End an engine at any point of its start; one that served is STOPPED afterwards."""
        if lifecycle.state in SERVABLE - {State.DRAINING}:
            lifecycle.to(State.DRAINING, "the fleet is torn down")
        process = self._processes.get(lifecycle)
        left = () if process is None else await process.stop(self._stop_s)
        self._processes.pop(lifecycle, None)  # only now: `end_all` has to find what did not end
        await self.release(lifecycle.engine)
        if left:
            gpus = ", ".join(self.taken[lifecycle]) or "none"
            lifecycle.stay(lifecycle.substate, f"processes {left} outlive SIGKILL; its GPUs ({gpus}) stay taken")
            return
        self.taken.pop(lifecycle, None)
        if lifecycle.state is State.DRAINING:
            lifecycle.to(State.STOPPED, "its process has ended")

    async def end_all(self) -> None:
        """End every engine, close the connections to them, and refuse further starts."""
        self._closed = True
        async with AsyncExitStack() as last:  # each step runs, even if an earlier one failed
            last.push_async_callback(self.close)
            last.push_async_callback(lambda: all_or_first_error(c.close() for c in self._controls.values()))
            await all_or_first_error(self.end(lifecycle) for lifecycle in tuple(self._processes))

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this fleet was torn down: no engine of it can start any more")


async def connect_engine(
    lifecycle: Lifecycle,
    url: str,
    *,
    api_key: str | None,
    control_timeout_s: float,
    process: EngineHandle | None = None,
    client: Callable[..., ControlClient] = ControlClient,
) -> Member:
    """Ask a LAUNCHING engine for its properties; it is SYNCING afterwards.

    EngineError: it does not answer in `CONNECT_S` seconds, or is no engine.
    """
    control = client(lifecycle.engine, url, api_key=api_key, timeout_s=control_timeout_s)
    async with AsyncExitStack() as failed:  # a long-lived fleet may meet many that do not answer
        failed.push_async_callback(control.close)
        try:
            async with asyncio.timeout(CONNECT_S):
                info = await control.info()
        except TimeoutError as error:
            raise DeadlineError(
                f"{url} did not say what it is within {CONNECT_S:g} s", seconds=CONNECT_S, engine=lifecycle.engine
            ) from error
        lifecycle.to(State.SYNCING, f"answers with weight version {info.weight_version}")
        failed.pop_all()
    return Member(
        lifecycle.engine,
        url,
        control,
        info,
        lifecycle,
        info.weight_version,
        api_key=api_key,
        process=process,
        ranks=info.dp,
    )
