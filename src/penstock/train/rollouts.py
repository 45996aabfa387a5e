"""Groups of rollouts: submitted as scheduled, completed in any order, batched."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config import RunConfig
from penstock.errors import PenstockError, StateError
from penstock.rollout.environment import Environment, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput, Trajectory
from penstock.train.resume import Progress
from penstock.train.staleness import Pacer, StalenessWindow
from penstock.train.step_metrics import SOLVED, policy_tokens
from penstock.types import SamplingParams

TRIES = 3
"""Number of attempts to get a sample that is not aborted. After the last one, the sample is left out."""
EVALUATED_AT_ONCE = 4096
"""Maximum number of tasks that an evaluation has in flight, so that a signal ends even a large one."""
_PAUSE_INSTEAD = "end no requests by abort_generation while a run goes on: pause_generation keeps what is in flight"


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
    tasks: asyncio.TaskGroup
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
