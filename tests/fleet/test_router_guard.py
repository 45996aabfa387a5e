"""When a router hangs, by its answers and the fleet's own time; and how a fleet hears of its start."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet_fakes import FakeProcess, FakeRouter, until

from penstock.errors import DeadlineError, EngineStartError
from penstock.fleet.roster import Roster
from penstock.fleet.router_process import RouterGuard, RouterProcess
from penstock.router_settings import RouterConfig
from penstock.settings import FleetConfig
from virtual_time import virtual

HANG = FleetConfig(health_interval_s=0.02, hang_timeout_s=0.6)


class Answers(FakeRouter):
    """A router whose answer to the next questions is this error, where there is one."""

    error: Exception | None = None
    after_s = 0.0
    """What a question takes that is not answered: the deadline of the call."""
    answered = 0.0
    """When the last question was answered."""

    async def epochs(self) -> list[int]:
        if self.error is not None:
            await asyncio.sleep(self.after_s)
            raise self.error
        self.answered = asyncio.get_running_loop().time()
        return await super().epochs()


async def until_killed(router: Answers, error: Exception | None) -> tuple[float, list[FakeProcess]]:
    """Seconds from the last answer before `error` to the router's end, and all that were started.

    Without an error it has 1.5 s to end.
    """
    made = [FakeProcess()]

    async def relaunch(*_: object) -> FakeProcess:
        router.error = None
        made.append(FakeProcess())
        return made[-1]

    guard = RouterGuard(made[0], relaunch)
    guard.watch(Roster(router), HANG)
    await until(lambda: router.answered > 0.0)
    answered = router.answered
    router.error = error
    try:
        await asyncio.wait([asyncio.ensure_future(made[0].wait())], timeout=1.5 if error is None else 30.0)
        seconds = asyncio.get_running_loop().time() - answered
        if error is not None:
            await until(lambda: len(made) > 1)
        await asyncio.sleep(0.3)
    finally:
        await guard.stop()
    return seconds, made


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (DeadlineError("no answer", seconds=0.05), 0.05),
        (DeadlineError("no answer", seconds=60.0), 60.0),
    ],
    ids=["shorter-deadline", "longer-deadline"],
)
@virtual
async def test_a_router_hangs_after_the_time_that_the_fleet_says_whatever_deadline_a_call_has(
    error: Exception, after_s: float
) -> None:
    router = Answers([])
    router.after_s = after_s
    seconds, made = await until_killed(router, error)
    assert 0.55 < seconds < 30.0
    assert made[0].killed
    assert len(made) == 2, "and is started anew, once"


@virtual
async def test_a_router_that_answers_now_and_then_does_not_hang() -> None:
    router = Answers([])
    questions = 0

    original = router.engines

    async def engines() -> Any:
        nonlocal questions
        questions += 1
        if questions % 3:
            await asyncio.sleep(0.3)  # longer than a question may take
        return await original()

    router.engines = engines  # type: ignore[method-assign]
    seconds, made = await until_killed(router, None)
    assert seconds > 1.4
    assert len(made) == 1


@pytest.mark.parametrize("max_restarts", [0, 5])
@virtual
async def test_a_router_that_does_not_start_is_tried_again_without_end(
    monkeypatch: pytest.MonkeyPatch, max_restarts: int
) -> None:
    waits: list[float] = []
    tries = 12
    made = [FakeProcess()]

    async def relaunch(*_: object) -> FakeProcess:
        if len(waits) < tries:
            raise EngineStartError("No space left on device")
        made.append(FakeProcess())
        return made[-1]

    async def sleep(seconds: float, original: Any = asyncio.sleep) -> None:
        if seconds >= 0.1:
            waits.append(seconds)
        await original(0.0)

    guard = RouterGuard(made[0], relaunch)
    guard.watch(Roster(Answers([])), FleetConfig(health_interval_s=0.05, max_restarts=max_restarts))
    monkeypatch.setattr("penstock.fleet.router_process.asyncio.sleep", sleep)
    made[0].kill()
    await until(lambda: len(made) == 2)
    assert waits == [min(0.1 * 2.0**i, 120.0) for i in range(tries)]
    made[1].kill()  # at once: the wait goes on from there
    await until(lambda: len(made) == 3)
    assert waits[-1] == 120.0
    monkeypatch.undo()
    await guard.stop()


# --- its start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'OSError: what it was'; exit 3", "OSError: what it was"),
        ("""while [ "$1" != --ready-fd ]; do shift; done; printf '{"url": "http' >&$2""", ""),
    ],
    ids=["without a word", "inside its report"],
)
async def test_the_error_of_a_router_that_ends_as_it_starts_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineStartError, match=rf"(?s)ended as it started; its log .*{says}"):
        await RouterProcess.launch(RouterConfig(), log_dir=tmp_path, api_key=None)
