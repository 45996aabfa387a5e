"""Groups of rollouts: submitted within the bound on staleness, completed in any order, batched."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.config import RunConfig
from penstock.errors import PenstockError, StateError
from penstock.rollout.environment import Environment, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.train.step_metrics import SOLVED, policy_tokens
from penstock.types import SamplingParams

TRIES = 3
"""Number of attempts to get a sample that is not aborted. After the last one, the sample is left out."""
EVALUATED_AT_ONCE = 4096
"""Maximum number of tasks that an evaluation has in flight, so that a signal ends even a large one."""
_PAUSE_INSTEAD = "end no requests by abort_generation while a run goes on: pause_generation keeps what is in flight"


@dataclass(slots=True)
class StalenessWindow:
    """Decides which groups may be submitted now, and which a step trains on. Pure counting: no clock, no I/O.

    A batch is `groups_per_batch` groups (B), and every group is trained on once. Group number `n` of the run may be
    submitted only if

        n < (version - start_version + max_staleness + 1) * B

    where `version` is what the engines have confirmed. This is AReaL's rate rule (arXiv 2505.24298), counted in groups.

    A step takes the oldest finished groups, so a slow group goes into a later batch. The step waits if the remaining
    groups could not all be trained on in time: a group submitted under version v is in the batch of trainer version
    v + max_staleness at the latest. Batches in the order of submission meet every such deadline. The bound on staleness
    therefore holds by construction, and no group is discarded. The engines never go back, so a group's tokens are never
    older than its submission. With `max_staleness = 0`, every group is due in its own batch.

    Attributes:
        start_version: weight version before the first step.
        version: weight version that the engines serve now.
        carried: groups that were submitted before a resume and must be submitted again.
        outstanding: groups submitted and not trained on, with the version that was served at their submission.
    """

    groups_per_batch: int
    max_staleness: int
    total_steps: int
    start_version: int = 0
    version: int = 0
    next_group: int = 0
    carried: Sequence[int] = ()
    outstanding: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def step(self) -> int:
        """Number of finished steps, derived from the groups trained on."""
        return (self.next_group - len(self.outstanding) - len(self.carried)) // self.groups_per_batch

    def take(self, ahead: int | None = None) -> list[int]:
        """Return the groups that may be submitted now. Each group is returned once.

        `ahead`: at most so many batches beyond the next step's; None: as many as the bound allows.
        """
        batches = self.version - self.start_version + self.max_staleness + 1
        if ahead is not None:
            batches = min(batches, self.step + 1 + ahead)
        limit = min(batches, self.total_steps) * self.groups_per_batch
        granted = [*self.carried, *range(self.next_group, limit)]
        self.carried = ()
        self.next_group = max(self.next_group, limit)
        self.outstanding.update(dict.fromkeys(granted, self.version))
        return granted

    def batch(self, done: AbstractSet[int]) -> list[int] | None:
        """Return the groups of the next step, in order, given the complete groups `done`; None: wait for more."""
        chosen = sorted(done, key=lambda group: (self.outstanding[group], group))[: self.groups_per_batch]
        left = sorted(version for group, version in self.outstanding.items() if group not in chosen)
        following = self.start_version + self.step + 1
        for place, version in enumerate(left):
            if following + place // self.groups_per_batch > version + self.max_staleness:
                return None
        return sorted(chosen) if len(chosen) == self.groups_per_batch else None

    def awaited(self) -> list[int]:
        """Return the groups that would fill the next batch if late groups came last."""
        carried = sum(group < self.step * self.groups_per_batch for group in self.outstanding)
        return sorted(self.outstanding)[: self.groups_per_batch + carried]

    def trained(self, groups: Iterable[int]) -> None:
        """Record that a step trains on these groups. They are then no longer outstanding."""
        for group in groups:
            del self.outstanding[group]

    def commit(self, version: int) -> None:
        """Record that the engines have confirmed `version`.

        Raises:
            StateError: it is not the version after the present one.
        """
        if version != self.version + 1:
            raise StateError(f"weight version {version} was put in force after {self.version}: versions go up by one")
        self.version = version


STARTS_PER_BATCH = 8
"""Number of portions in which a batch's groups start. An engine makes tokens cheaper for several groups at once."""


class Pacer:
    """Starts groups at the learner's pace, not all at once when an update commits.

    If training is the slower side, the staleness window opens for a whole batch when an update commits. If all its
    groups started at once, they would finish early and grow stale, and the next update would find idle engines. Spread
    over the learner's busy time, the same work starts later, under newer weights. The pace is the learner's busy time,
    never its waiting time. If rollouts are the slower side, groups therefore start ahead of need.

    `busy_s`: seconds that the learner was busy with the last batch; 0: no pacing.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._turns: dict[int, asyncio.Event] = {}
        self._hurried = -1

    async def turn(self, group: int, place: int, of: int) -> None:
        """Return when group `place` of the `of` groups admitted together should start.

        The group starts at once if the learner waits for it (`hurry`), else in the middle of its portion of `busy_s`.
        """
        portion = place * STARTS_PER_BATCH // of
        delay = self.busy_s * (portion + 0.5) / STARTS_PER_BATCH
        if delay <= 0 or group <= self._hurried:
            return
        turn = self._turns[group] = asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await turn.wait()
        finally:
            del self._turns[group]

    def hurry(self, groups: Iterable[int]) -> None:
        """Start these groups and all before them now, because the learner waits for them."""
        self._hurried = max(self._hurried, *groups)
        for group, turn in self._turns.items():
            if group <= self._hurried:
                turn.set()


@dataclass(slots=True)
class Progress:
    """Progress of a run, which a checkpoint holds in addition to the learner.

    Attributes:
        generated_tokens: response tokens of all completed groups.
        wasted_tokens: tokens discarded, those of aborted samples among them.
        resumed_at: steps at which the run was resumed.
        seconds: seconds by activity (`Stopwatch.totals`), at the last checkpoint.
        carried: groups that were submitted and not trained on, at the last checkpoint.
    """

    step: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    aborted_samples: int = 0
    resumed_at: list[int] = field(default_factory=list[int])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    carried: list[int] = field(default_factory=list[int])

    @property
    def unconsumed_tokens(self) -> int:
        """Tokens that were generated and may still be trained on."""
        return self.generated_tokens - self.trained_tokens - self.wasted_tokens

    def resumed(self, dropped: Sequence[Mapping[str, float]]) -> None:
        """Count the cost of a kill, given the rows of the steps after the checkpoint.

        The cost is every recorded token generated since the checkpoint, and the unconsumed tokens at the checkpoint.
        """
        self.wasted_tokens += self.unconsumed_tokens
        lost = int(sum(row["generated_tokens"] for row in dropped))
        self.generated_tokens += lost
        self.wasted_tokens += lost
        self.resumed_at.append(self.step)


def group_seed(run_seed: int, group: int) -> int:
    """Return the sampling seed of a group's first sample, 31 bits. Hashed, so that groups share no samples."""
    name = f"{run_seed}/{group}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) >> 1


@dataclass(slots=True)
class Rollouts:
    """The rollouts of one run. Groups run in `tasks`, so the first failure ends the run."""

    config: RunConfig
    generator: Generator
    environment: Environment
    progress: Progress
    window: StalenessWindow
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    pacer: Pacer = field(default_factory=Pacer)
    _groups: dict[int, asyncio.Task[list[Trajectory]]] = field(
        default_factory=dict[int, "asyncio.Task[list[Trajectory]]"]
    )

    def submit(self, *, ahead: int | None = None) -> None:
        """Start the groups that may start now. `ahead`: see `StalenessWindow.take`."""
        admitted = self.window.take(ahead)
        for place, group in enumerate(admitted):
            work = self._roll_out(group, place, len(admitted))
            self._groups[group] = self.tasks.create_task(work, name=f"rollout-{group}")

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the trajectories of the next step, with its groups in order.

        Raises:
            StateError: every sample of the step was aborted.
        """
        step = self.window.step
        self.pacer.hurry(self.window.awaited())
        while (groups := self.window.batch({g for g, task in self._groups.items() if task.done()})) is None:
            running = [task for task in self._groups.values() if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self.window.trained(groups)
        batch = [trajectory for group in groups for trajectory in self._groups.pop(group).result()]
        if not batch:
            raise StateError(f"every sample of step {step + 1} was aborted {TRIES} times; {_PAUSE_INSTEAD}")
        return batch

    async def settled(self) -> None:
        if self._groups:
            await asyncio.wait(self._groups.values())

    async def _roll_out(self, group: int, place: int, of: int) -> list[Trajectory]:
        """Return the complete samples of a group.

        `abort_generation` may cut any sample, so an episode with an aborted one has no valid reward. The whole episode
        is discarded, counted, and requested again. Part of an agent's episode would lack the turns that train in
        another part.
        """
        config, progress = self.config, self.progress
        await self.pacer.turn(group, place, of)
        whole: list[Trajectory] = []
        # Sampling is seeded only if that makes a run reproducible. If weights change in flight, a token's version
        # depends on timing, and vLLM samples seeded requests one by one (topk_topp_sampler).
        seed = group_seed(config.seed, group) if config.train.staleness == 0 else None
        missing = config.rollout.group_size
        for _ in range(TRIES):
            made = (await self._generate(group, missing, seed)).trajectories
            cut = {_episode(t) for t in made if t.stop_reason == "abort"}
            aborted = [t for t in made if _episode(t) in cut]
            whole += [t for t in made if _episode(t) not in cut]
            progress.generated_tokens += policy_tokens(made)
            progress.wasted_tokens += policy_tokens(aborted)
            progress.aborted_samples += len(aborted)
            missing = len(cut)
            if not missing:
                break
            seed = None  # the same seed would repeat samples
        return whole

    async def _generate(self, group: int, samples: int, seed: int | None) -> GeneratorOutput:
        seeds = None if seed is None else (seed,)
        try:
            with user_code(f"the rollout of group {group} failed", PenstockError):
                task = self.environment.train_task(group)
                batch = GeneratorInput((task,), samples, group_ids=(str(group),), seeds=seeds)
                return await self.generator.generate(batch)
        except PenstockError as error:
            error.add_note(f"in the rollout of group {group}")
            raise


def _episode(trajectory: Trajectory) -> str:
    return trajectory.episode_id or str(id(trajectory))


async def greedy_accuracy(generator: Generator, tasks: Sequence[Task], max_tokens: int) -> float:
    """Return the fraction of tasks solved greedily. A task is solved by one response of reward 1 or more.

    Raises:
        StateError: some responses were aborted every time, so they say nothing about the policy.
    """
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    solved, left = set[str](), {str(i): task for i, task in enumerate(tasks)}
    for _ in range(TRIES):
        asked, left = left, dict[str, Task]()
        names = list(asked)
        for groups in (names[at : at + EVALUATED_AT_ONCE] for at in range(0, len(names), EVALUATED_AT_ONCE)):
            batch = GeneratorInput([asked[group] for group in groups], group_ids=groups, sampling_params=greedy)
            made = (await generator.generate(batch)).trajectories  # an agent's episode may yield several, or none
            aborted = {t.group_id for t in made if t.stop_reason == "abort"}
            solved |= {t.group_id for t in made if t.reward >= SOLVED} - aborted
            left |= {group: asked[group] for group in groups if group in aborted}
        if not left:
            return len(solved) / len(tasks)
    raise StateError(f"{len(left)} of {len(tasks)} evaluation samples were aborted {TRIES} times; {_PAUSE_INSTEAD}")
