"""Fully asynchronous GRPO (R30): rollouts go on while the learner trains, and weights change while they go on.

One loop: wait for the groups of the next batch, train on them in a thread, put the new weights in force in flight,
let the groups start that the staleness window now allows. Everything else (HTTP, scoring, more groups) runs beside it
on the event loop. Nothing polls: a committed update admits the next groups, which start at the pace at which the
learner takes them (`pacing`), and the loop wakes when the last group it waits for is done.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from penstock.config import RunConfig
from penstock.engine.interface import Engine
from penstock.errors import PenstockError, StateError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.observe.trajectory_log import TrajectoryRecord, pick
from penstock.rollout.environment import Environment, Task, user_code
from penstock.rollout.generator import Generator, GeneratorInput, GeneratorOutput
from penstock.train.grpo import Trainee
from penstock.train.resume import Progress, begin, save_checkpoint, take_up
from penstock.train.schedule import Pacer, StalenessWindow
from penstock.train.step_metrics import (
    Stopwatch,
    batch_metrics,
    check_ages,
    learner_metrics,
    logprob_alarm,
    policy_tokens,
    token_ages,
    update_metrics,
)
from penstock.types import SamplingParams, Trajectory, UpdateReport

log = logging.getLogger(__name__)
TRIES = 3
"""How often samples are asked for that come back aborted; then they are left out."""
_PAUSE_INSTEAD = "end no requests by abort_generation while a run goes on: pause_generation keeps what is in flight"
T = TypeVar("T")


async def train(
    config: RunConfig,
    client: Engine,
    *,
    learner: Trainee,
    generator: Generator,
    environment: Environment,
    folder: RunFolder,
    reporter: Reporter,
    resume: bool = False,
) -> Summary:
    """Run `config.train.steps` steps, evaluate before and after, and write everything into `folder`.

    Cancelling ends the rollouts, lets a step or an update under way come to its end, and leaves a folder that `resume`
    can go on with.

    Args:
        config: of the run.
        client: the engines, freshly loaded with the learner's model.
        learner: holds the weights being trained.
        generator: makes episodes with `client`.
        environment: gives the tasks.
        folder: of this run; `RunFolder.create` for a new one, `RunFolder.open` for one to resume.
        reporter: gets every event of the run.
        resume: go on from the folder's last checkpoint.

    Raises:
        UserError: the folder holds a run and `resume` is off, or cannot be resumed with this configuration.
        StateError: the engines do not serve the weights that the learner starts from.
        PenstockError: a rollout or an update failed for good; the message says which.
    """
    if resume:
        reporter.on_phase("resume")
    progress = take_up(config, folder, learner) if resume else begin(folder)
    run = _Run(config, client, learner, generator, environment, folder, reporter, progress)
    for step, accuracy in folder.evaluations().items():
        run.report_evaluation(step, accuracy)
    await run.put_in_force()
    await run.evaluate_if_due()
    await run.train_to_the_end()
    return run.summarize()


def group_seed(run_seed: int, group: int) -> int:
    """Sampling seed of a group's first sample, 31 bits; hashed, as neighbouring seeds would share samples."""
    name = f"{run_seed}/{group}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) >> 1


@dataclass(slots=True)
class _Run:
    """State of one run; its methods are the schedule."""

    config: RunConfig
    client: Engine
    learner: Trainee
    generator: Generator
    environment: Environment
    folder: RunFolder
    reporter: Reporter
    progress: Progress
    watch: Stopwatch = field(init=False)
    window: StalenessWindow = field(init=False)
    groups: dict[int, asyncio.Task[list[Trajectory]]] = field(init=False)
    """Groups submitted and not yet trained on, by index."""
    pacer: Pacer = field(init=False)
    recovering: asyncio.Task[UpdateReport] | None = None
    """Waits for what the last update cost."""
    generated_before: int = field(init=False)
    """`progress.generated_tokens` at the last recorded step."""

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.progress.seconds)
        self.window = StalenessWindow.after(
            self.progress.step,
            groups_per_batch=self.config.rollout.groups_per_batch,
            max_staleness=self.config.train.max_staleness,
            total_steps=self.config.train.steps,
            version=self.learner.version,
        )
        self.groups = {}
        self.pacer = Pacer()
        self.generated_before = self.progress.generated_tokens

    async def put_in_force(self) -> None:
        """Have the engines serve the learner's weights: at the start of a new run they do, else they are sent."""
        served, wanted = self.client.weight_version, self.learner.version
        if served == wanted == 0:
            return
        if served >= wanted and self.learner.served_adapter is None:
            raise StateError(
                f"the engines serve weight version {served} and the learner starts at {wanted}: a run needs engines "
                "freshly loaded from the model; restart them"
            )
        log.info("putting version %d in force, after step %d", wanted, self.progress.step)
        await _to_the_end(self.learner.put_in_force(self.client))

    async def evaluate_if_due(self) -> None:
        """Measure held-out accuracy of the weights in force: before, after, and every `eval.every` steps."""
        step, last, every = self.progress.step, self.config.train.steps, self.config.eval.every
        due = step in {0, last} or (every and step % every == 0)
        if not due or step in self.folder.evaluations():
            return
        self.reporter.on_phase("evaluate")
        with self.watch.measure("evaluation"):
            tasks = self.environment.heldout_tasks(self.config.eval.size)
            accuracy = await greedy_accuracy(self.generator, tasks, self.config.rollout.max_tokens)
        self.folder.append_evaluation(step, accuracy)
        log.info("held-out accuracy after step %d: %.4f of %d", step, accuracy, len(tasks))
        self.report_evaluation(step, accuracy)

    async def train_to_the_end(self) -> None:
        """All remaining steps, with rollouts beside them; the first failure of either ends both."""
        try:
            async with asyncio.TaskGroup() as rollouts:
                self.reporter.on_phase("train")
                self.watch.lap()
                self._submit(rollouts)
                while self.progress.step < self.config.train.steps:
                    await self._step(rollouts)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            log.error("run ended after step %d: %s", self.progress.step, first)  # noqa: TRY400 - it is raised
            raise first from first.__cause__
        finally:
            if self.recovering is not None:
                self.recovering.cancel()

    def summarize(self) -> Summary:
        """Write the summary and tell the reporter."""
        progress = self.progress
        summary = Summary.of(
            self.folder.metrics(),
            name=self.config.name,
            seed=self.config.seed,
            resumed_at=progress.resumed_at,
            evaluations=self.folder.evaluations(),
            wasted_tokens=progress.wasted_tokens,
            unconsumed_tokens=progress.unconsumed_tokens,
            seconds=self.watch.totals(),
        )
        self.folder.write_summary(summary)
        self.reporter.on_phase("done")
        self.reporter.on_end(summary)
        return summary

    # --- one step ----------------------------------------------------------------------------------------------------

    async def _step(self, rollouts: asyncio.TaskGroup) -> None:
        trainer_version = self.learner.version
        with self.watch.measure("waiting"):
            batch = await self._next_batch()
        ages = token_ages(batch, trainer_version)
        check_ages(ages, self.config.train.max_staleness)
        began = time.monotonic()
        with self.watch.measure("training"):
            learned = await _to_the_end(asyncio.to_thread(self.learner.step, batch))
        with self.watch.measure("update"):
            report = await _to_the_end(self.learner.put_in_force(self.client))
        if self.config.train.max_staleness:  # a synchronous run has nothing to do while rollouts go on
            self.pacer.busy_s = time.monotonic() - began
        self.window.commit(self.learner.version)
        self._submit(rollouts)
        if (warning := logprob_alarm(learned, self.config.train.logprob_alarm)) is not None:
            log.warning("step %d: %s", self.progress.step + 1, warning)
        lost = await self._tokens_lost(report)
        self._record(batch, {**batch_metrics(batch, ages), **learner_metrics(learned), **lost}, report)
        await self._checkpoint_if_due()
        await self.evaluate_if_due()

    async def _tokens_lost(self, report: UpdateReport) -> dict[str, float]:
        """Return what the update before this one cost, which has ended its measurement, and begin to ask for this."""
        before, self.recovering = self.recovering, asyncio.create_task(self.client.recovered(report))
        if before is None:
            return {}
        try:
            lost = (await before).tokens_lost
        except PenstockError as error:  # a figure is missing, and nothing else
            log.warning("what the update before step %d cost is unknown: %s", self.progress.step + 1, error)
            return {}
        return {} if lost is None else {"update/tokens_lost": lost}

    def _submit(self, rollouts: asyncio.TaskGroup) -> None:
        admitted = self.window.take()
        for place, group in enumerate(admitted):
            work = self._roll_out(group, place, len(admitted))
            self.groups[group] = rollouts.create_task(work, name=f"rollout-{group}")

    async def _roll_out(self, group: int, place: int, of: int) -> list[Trajectory]:
        """The whole samples of a group.

        `abort_generation` cuts samples anywhere, so an aborted one has no reward of its own: it is thrown away, counted
        and asked for again.
        """
        config, progress = self.config, self.progress
        await self.pacer.turn(group, place, of)
        whole: list[Trajectory] = []
        # Sampling is seeded only where that makes a run reproducible: with weights that change in flight, the version
        # that makes a token is a matter of timing, and vLLM draws for seeded requests one by one (topk_topp_sampler).
        seed = group_seed(config.seed, group) if config.train.max_staleness == 0 else None
        for _ in range(TRIES):
            made = (await self._generate(group, config.rollout.group_size - len(whole), seed)).trajectories
            aborted = [t for t in made if t.stop_reason == "abort"]
            whole += [t for t in made if t.stop_reason != "abort"]
            progress.generated_tokens += policy_tokens(made)
            progress.wasted_tokens += policy_tokens(aborted)
            progress.aborted_samples += len(aborted)
            if not aborted:
                break
            seed = None  # with the same one, samples would come twice
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

    async def _next_batch(self) -> list[Trajectory]:
        batch: list[Trajectory] = []
        wanted = self.window.batch(self.progress.step)
        self.pacer.hurry(wanted)
        for group in wanted:
            batch += await self.groups[group]
            del self.groups[group]
        if not batch:
            raise StateError(
                f"every sample of step {self.progress.step + 1} was aborted {TRIES} times; {_PAUSE_INSTEAD}"
            )
        return batch

    def _record(self, batch: Sequence[Trajectory], figures: Mapping[str, float], report: UpdateReport) -> None:
        """Add the step to the folder and tell the reporter. Nothing awaits in here, so that the counts agree."""
        progress = self.progress
        progress.step += 1
        progress.trained_tokens += policy_tokens(batch)
        lap = self.watch.lap()
        generated = progress.generated_tokens - self.generated_before
        self.generated_before = progress.generated_tokens
        row = {
            "step": progress.step,
            "version": self.learner.version,
            **figures,
            "generated_tokens": generated,
            "tokens_per_second": generated / lap["step"],
            "wasted_tokens": progress.wasted_tokens,
            "aborted_samples": progress.aborted_samples,
            **update_metrics(report),
            **{f"seconds/{name}": seconds for name, seconds in lap.items()},
        }
        self.folder.append_trajectories([TrajectoryRecord.of(progress.step, t, self._decode) for t in pick(batch)])
        self.folder.append_metrics(row)
        self.reporter.on_update(report)
        self.reporter.on_step(row)

    async def _checkpoint_if_due(self) -> None:
        step = self.progress.step
        if step % self.config.train.checkpoint_every and step != self.config.train.steps:
            return
        self.reporter.on_phase("checkpoint")
        self.progress.seconds = self.watch.totals()
        progress = asdict(self.progress)  # here and not in the thread: rollouts go on counting
        with self.watch.measure("checkpoint"):
            await _to_the_end(asyncio.to_thread(save_checkpoint, self.folder, self.learner, progress))

    def report_evaluation(self, step: int, accuracy: float) -> None:
        """Tell the reporter of a held-out accuracy, measured now or before the run was resumed."""
        name = "before" if step == 0 else "after" if step == self.config.train.steps else f"step {step}"
        self.reporter.on_eval(name, accuracy)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.generator.tokenizer.decode(token_ids, skip_special_tokens=False)


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not be left half done: cancelling waits for its end first (it has deadlines of its own)."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain: the cancellation is what the caller gets
        raise


async def greedy_accuracy(generator: Generator, tasks: Sequence[Task], max_tokens: int) -> float:
    """Fraction of tasks solved by the most likely response: temperature 0, one response each, reward of at least 1.

    Args:
        generator: of the policy to judge.
        tasks: held out from training.
        max_tokens: bound on a response.

    Raises:
        StateError: responses were aborted time and again; an aborted one says nothing of the policy.
    """
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    solved, left = 0, list(tasks)
    for _ in range(TRIES):
        made = (await generator.generate(GeneratorInput(left, sampling_params=greedy))).trajectories
        solved += sum(t.reward >= 1 for t in made if t.stop_reason != "abort")
        left = [task for task, t in zip(left, made, strict=True) if t.stop_reason == "abort"]
        if not left:
            return solved / len(tasks)
    raise StateError(f"{len(left)} of {len(tasks)} evaluation samples were aborted {TRIES} times; {_PAUSE_INSTEAD}")
