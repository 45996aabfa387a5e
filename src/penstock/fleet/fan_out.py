"""Fan-out: one control call to many engines at once, each with its own deadline and its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import DeadlineError, EngineError, FanOutError, PenstockError
from penstock.fleet.member import EngineControl, Member

T = TypeVar("T")
Call = Callable[[EngineControl], Awaitable[T]]
OnFailure = Callable[[Member, PenstockError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FanOut(Generic[T]):
    """What each engine of a snapshot answered, by name and in the snapshot's order; every one is in one of the two."""

    results: Mapping[str, T]
    failures: Mapping[str, PenstockError]

    def raise_for(self, what: str) -> None:
        """Raise `FanOutError` with every failure, if one engine failed; of a single engine, its own error."""
        if not self.results and len(self.failures) == 1:
            self.raise_first()
        if self.failures:
            each = "; ".join(f"{name}: {error}" for name, error in self.failures.items())
            count = len(self.failures) + len(self.results)
            raise FanOutError(
                f"{what} failed on {len(self.failures)} of {count} engines ({each})",
                failures=self.failures,
                results=self.results,
            )

    def raise_first(self) -> None:
        """Raise the failure of the first engine that failed, if one did."""
        for error in self.failures.values():
            raise error


async def fan_out(
    members: Sequence[Member], call: Call[T], *, deadline_s: float, on_failure: OnFailure | None = None
) -> FanOut[T]:
    """Make `call` on every member at once and wait for every outcome; a failure of one does not touch the others.

    Args:
        members: a snapshot; who joins later is not asked.
        call: the control call, such as `lambda engine: engine.resume()`.
        deadline_s: seconds that each engine has; then its outcome is a `DeadlineError`.
        on_failure: awaited for a failed engine as soon as it has failed, while others may still be at work; not where
            the engine has been started anew since it was asked.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_outcome(m, call, deadline_s, on_failure)) for m in members]
    outcomes = {member.name: task.result() for member, task in zip(members, tasks, strict=True)}
    return FanOut(
        results={name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, _Failed)},
        failures={name: outcome.error for name, outcome in outcomes.items() if isinstance(outcome, _Failed)},
    )


@dataclass(frozen=True, slots=True)
class _Failed:
    error: PenstockError


async def _outcome(member: Member, call: Call[T], deadline_s: float, on_failure: OnFailure | None) -> T | _Failed:
    error: PenstockError
    control = member.control
    try:
        async with asyncio.timeout(deadline_s):
            return await call(control)
    except TimeoutError:
        error = DeadlineError(f"no answer within {deadline_s:g} s", seconds=deadline_s, engine=member.name)
    except PenstockError as failed:
        error = failed
    except (KeyError, TypeError, ValueError) as malformed:
        error = EngineError(f"answered something that cannot be read: {malformed!r}", engine=member.name)
    if on_failure is not None and member.control is control:
        await on_failure(member, error)
    return _Failed(error)
