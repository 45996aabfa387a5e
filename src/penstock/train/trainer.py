"""One run: steps by a schedule, evaluations, checkpoints and records (R30).

`penstock.train.schedules` has the order of a step. Everything else (HTTP, scoring, more groups) runs on the same event
loop, which wakes when a group is done. Only the trace polls: it asks for requests in flight twenty times a second.

A checkpoint holds the learner (weights, optimiser, random state) and `Progress`. It holds no rollouts, because the task
of group `i` depends only on the seed and `i`. The groups in flight at a kill are generated again, from the same tasks
and under weights that are never older. In a synchronous run, their sampling seeds and weights are the same too, so the
resumed run equals an uninterrupted one: no step is recorded twice, and none is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.aio import in_thread
from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.engine.layouts import read_shape
from penstock.errors import CheckpointError, MissingCapabilityError, PenstockError, StateError, UserError, WeightsError
from penstock.fleet.fleet import Fleet
from penstock.observe.run_folder import RunFolder, pick, record_of
from penstock.observe.summary import Reporter, Summary
from penstock.observe.trace import LEARNER, Loads, Tracer
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import Generator, Trajectory
from penstock.train import checkpoint
from penstock.train.grpo import Trainee
from penstock.train.rollouts import Progress, Rollouts, StalenessWindow, greedy_accuracy
from penstock.train.schedules import SCHEDULES, Learned, to_the_end
from penstock.train.step_metrics import (
    LogprobAlarm,
    Stopwatch,
    batch_metrics,
    learner_metrics,
    policy_tokens,
    replayed_share,
    token_ages,
    update_metrics,
)

log = logging.getLogger(__name__)


async def train(
    config: RunConfig,
    client: Fleet,
    *,
    trainee: Trainee,
    generator: Generator,
    environment: Environment,
    folder: RunFolder,
    reporter: Reporter,
    resume: bool = False,
    loads: Loads | None = None,
) -> Summary:
    """Run `config.train.steps` steps and evaluations, and record all in `folder`.

    A cancellation ends the rollouts and lets a step or an update under way finish. The folder can then be resumed. The
    engines of `client` are freshly loaded with the learner's model. `loads` returns the requests in flight on each
    engine, for the trace and the engines' idle share.

    Raises:
        UserError: the folder holds a run and `resume` is off, or the run cannot be resumed with this configuration.
        StateError: the engines do not serve the weights from which the learner starts.
        PenstockError: a rollout or an update failed for good. The message names it.
    """
    if resume:
        reporter.on_phase("resume")
        progress = take_up(config, folder, trainee)
        if progress.step == 0:
            reporter.on_phase("restart")
    else:
        RunFolder.check_unused(folder.path)
        progress = Progress()
    if config.engines_may_differ and trainee.adapter is None and not trainee.version:
        trainee.learner.versions[None] = 1  # version 0 are the weights that engines were loaded with
    run = Run(config, client, trainee, generator, environment, folder, reporter, progress, loads)
    return await run.to_the_end()


@dataclass(slots=True)
class Run:
    """State of one run, and the parts that its schedule arranges: `next_batch`, `settled`, `learn` and `update`."""

    config: RunConfig
    client: Fleet
    trainee: Trainee
    generator: Generator
    environment: Environment
    folder: RunFolder
    reporter: Reporter
    progress: Progress
    loads: Loads | None
    watch: Stopwatch = field(init=False)
    tracer: Tracer = field(init=False)
    rollouts: Rollouts = field(init=False)
    alarm: LogprobAlarm = field(init=False)
    heldout: Sequence[Task] = ()
    recovering: asyncio.Task[UpdateReport] | None = None
    """Waits for the cost of the last update."""
    generated_before: int = field(init=False)
    """`progress.generated_tokens` at the last recorded step."""

    def __post_init__(self) -> None:
        config, progress = self.config, self.progress
        self.watch = Stopwatch(progress.seconds)
        self.tracer = Tracer(self.watch.now, self.loads)
        self.watch.on_span = partial(self.tracer.add, LEARNER)
        self.alarm = LogprobAlarm(config.train.logprob_alarm, simulated=config.engine.profile == "sim")
        groups, carried = config.rollout.groups_per_batch, progress.carried
        window = StalenessWindow(
            groups,
            config.train.staleness,
            config.train.steps,
            start_version=self.trainee.version - progress.step,
            version=self.trainee.version,
            next_group=progress.step * groups + len(carried),
            carried=carried,
        )
        self.rollouts = Rollouts(config, self.generator, self.environment, progress, window)
        self.generated_before = progress.generated_tokens

    async def to_the_end(self) -> Summary:
        """Do everything that is left of the run."""
        for step, accuracy in self.folder.evaluations().items():
            self._report_evaluation(step, accuracy)
        await self._put_in_force()
        # Called here, while no rollout uses the environment.
        self.heldout = await in_thread(partial(self.environment.heldout_tasks, self.config.eval.size), leave_s=0.0)
        await self._evaluate_if_due()
        await self._train()
        return self._summarize()

    # --- what a schedule arranges ------------------------------------------------------------------------------------

    async def next_batch(self) -> list[Trajectory]:
        """Wait for the next batch; see `Rollouts.next_batch`."""
        with self.watch.measure("waiting"):
            return await self.rollouts.next_batch()

    async def settled(self) -> None:
        """Wait for all submitted groups; see `Rollouts.settled`."""
        with self.watch.measure("waiting"):
            await self.rollouts.settled()

    async def learn(self, batch: Sequence[Trajectory]) -> Learned:
        """Train on a batch in a thread. The learner's version goes up by one.

        Raises:
            StateError: a token is older than the schedule allows, or the loss is not finite.
        """
        ages = token_ages(batch, self.trainee.version, self.config.train.staleness)
        with self.watch.measure("training"):
            return Learned(batch, ages, await to_the_end(asyncio.to_thread(self.trainee.step, batch)))

    async def update(self) -> UpdateReport:
        """Put the learner's weights in force on the engines. `rollouts.submit` may then start more groups."""
        began = self.watch.now()
        with self.watch.measure("update"):
            report = await to_the_end(self.trainee.put_in_force(self.client))
        self.tracer.of_update(report, began)
        self.rollouts.window.commit(self.trainee.version)
        return report

    # --- before and after the steps ----------------------------------------------------------------------------------

    async def _put_in_force(self) -> None:
        """Make the engines serve the learner's weights. Send them unless both sides just loaded the checkpoint."""
        served, wanted = self.client.weight_version, self.trainee.version
        if served == wanted == 0:
            return
        if served >= wanted and self.trainee.served_adapter is None:
            raise StateError(
                f"the engines serve weight version {served} and the learner starts at {wanted}: a run needs engines "
                "freshly loaded from the model; restart them"
            )
        log.info("putting version %d in force, after step %d", wanted, self.progress.step)
        try:
            await self._put_base_in_force()
            await to_the_end(self.trainee.put_in_force(self.client))
        except WeightsError as error:
            raise StateError(
                f"the engines do not take the weights of {self.config.learner_model}, from which the learner starts: "
                f"{error}; give engines and learner (train.model) the same model"
            ) from error

    async def _put_base_in_force(self) -> None:
        """Send the learner's base to engines that may hold another one and can take it."""
        if not self.config.engines_may_differ or self.trainee.served_adapter is None:
            return
        if read_shape(self.config.engine.model).quantised:  # many formats accept an adapter but no weights
            return
        try:
            await to_the_end(self.client.update_weights(self.trainee.learner.weights(None)))
        except MissingCapabilityError as error:  # vLLM without our plugin accepts only adapters
            log.warning("whether the engines add the adapter to the learner's base is unknown: %s", error)

    async def _evaluate_if_due(self) -> None:
        """Measure held-out accuracy of the served weights, if due: first, last, every `eval.every` steps."""
        step, last, every = self.progress.step, self.config.train.steps, self.config.eval.every
        due = step in {0, last} or (every and step % every == 0)
        if not due or step in self.folder.evaluations():
            return
        self.reporter.on_phase("evaluate")
        with self.watch.measure("evaluation"):
            accuracy = await greedy_accuracy(self.generator, self.heldout, self.config.rollout.max_tokens)
        self.folder.append_evaluation(step, accuracy)
        log.info("held-out accuracy after step %d: %.4f of %d", step, accuracy, len(self.heldout))
        self._report_evaluation(step, accuracy)

    async def _train(self) -> None:
        """Run all remaining steps and the rollouts. The first failure of either ends both."""
        watching = asyncio.create_task(self.tracer.watch(), name="tracer")
        try:
            async with self.rollouts.tasks:
                self.reporter.on_phase("train")
                self.watch.lap()
                while self.progress.step < self.config.train.steps:
                    await self._step()
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            log.error("run ended after step %d: %s", self.progress.step, first)  # noqa: TRY400 - it is raised
            raise first from first.__cause__
        finally:
            watching.cancel()
            if self.recovering is not None:
                self.recovering.cancel()

    def _summarize(self) -> Summary:
        progress = self.progress
        self.folder.append_spans(self.tracer.cut(progress.step, 0.0)[0])
        summary = Summary.of(
            self.folder.metrics(),
            name=self.config.name,
            seed=self.config.seed,
            resumed_at=tuple(progress.resumed_at),
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

    async def _step(self) -> None:
        learned, report = await SCHEDULES[self.config.train.schedule](self)
        if (warning := self.alarm.warning(learned.figures)) is not None:
            log.warning("step %d: %s", self.progress.step + 1, warning)
            self.reporter.on_warning(f"step {self.progress.step + 1}: {warning}")
        lost = await self._tokens_lost(report)
        learner = learner_metrics(learned.figures, simulated=self.alarm.simulated)
        figures = {**batch_metrics(learned.batch, learned.ages), **learner, **lost}
        if failed := figures.get("agent/failed"):
            self.reporter.on_warning(f"step {self.progress.step + 1}: {failed:.0%} of the agents failed; see run.log")
        if self.config.engine.enable_return_routed_experts:
            figures["replayed_share"] = replayed_share(learned.batch)
        self._record(learned.batch, figures, report)
        await self._checkpoint_if_due()
        await self._evaluate_if_due()

    async def _tokens_lost(self, report: UpdateReport) -> dict[str, float]:
        """Return the cost of the previous update, and start to measure this one's."""
        before, self.recovering = self.recovering, asyncio.create_task(self.client.recovered(report))
        if before is None:
            return {}
        try:
            lost = (await before).tokens_lost
        except PenstockError as error:  # one figure is missing, without further harm
            log.warning("what the update before step %d cost is unknown: %s", self.progress.step + 1, error)
            return {}
        return {} if lost is None else {"update/tokens_lost": lost}

    def _record(self, batch: Sequence[Trajectory], figures: Mapping[str, float], report: UpdateReport) -> None:
        """Add the step to the folder and report it. It never awaits, so that the counts agree."""
        progress = self.progress
        progress.step += 1
        progress.trained_tokens += policy_tokens(batch)
        lap = self.watch.lap()
        generated = progress.generated_tokens - self.generated_before
        self.generated_before = progress.generated_tokens
        row = {
            "step": progress.step,
            "version": self.trainee.version,
            **figures,
            "generated_tokens": generated,
            "tokens_per_second": generated / lap["step"],
            "wasted_tokens": progress.wasted_tokens,
            "aborted_samples": progress.aborted_samples,
            **update_metrics(report),
            **{f"seconds/{name}": seconds for name, seconds in lap.items()},
            "idle/learner": lap["waiting"] / lap["step"],
        }
        spans, idle = self.tracer.cut(progress.step, lap["step"])
        if idle is not None:
            row["idle/engines"] = idle
        self.folder.append_spans(spans)
        decode = partial(self.generator.tokenizer.decode, skip_special_tokens=False)
        self.folder.append_trajectories([record_of(progress.step, t, decode) for t in pick(batch)])
        self.folder.append_metrics(row)
        self.reporter.on_update(report)
        self.reporter.on_step(row)

    async def _checkpoint_if_due(self) -> None:
        step = self.progress.step
        if step % self.config.train.checkpoint_every and step != self.config.train.steps:
            return
        self.reporter.on_phase("checkpoint")
        self.progress.seconds = self.watch.totals()
        self.progress.carried = sorted(self.rollouts.window.outstanding)
        progress = asdict(self.progress)  # copied here and not in the thread, because rollouts go on counting

        def write(path: Path) -> Mapping[str, Any]:
            return {"learner": dict(self.trainee.save(path)), "run": progress}

        with self.watch.measure("checkpoint"):
            await to_the_end(asyncio.to_thread(checkpoint.save, self.folder.path, step, write))

    def _report_evaluation(self, step: int, accuracy: float) -> None:
        """Report a held-out accuracy, measured now or before a resume."""
        name = "before" if step == 0 else "after" if step == self.config.train.steps else f"step {step}"
        self.reporter.on_eval(name, accuracy)


def check_resume(config: RunConfig, folder: RunFolder) -> None:
    """Raise the errors of `take_up` that are known before anything is loaded."""
    folder.check_resumable(config)
    step = checkpoint.latest_step(folder.path)
    if step > config.train.steps:
        raise UserError(f"{folder.path} is at step {step}, beyond train.steps={config.train.steps}; ask for more steps")


def take_up(config: RunConfig, folder: RunFolder, trainee: Trainee) -> Progress:
    """Load the last checkpoint into `trainee`, if any. Cut the folder's records back to it, or to the start.

    Raises:
        ConfigError: the configuration differs from the run's.
        UserError: the run is beyond `train.steps`.
        CheckpointError: the checkpoint is damaged or belongs to another model; nothing is changed.
    """
    check_resume(config, folder)
    progress = Progress()
    path = checkpoint.latest(folder.path)
    if path is not None:
        _, values = checkpoint.load(path)
        try:
            progress, of_learner = Progress(**values["run"]), values["learner"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {path} is not one of a training run: {error!r}") from error
        trainee.load(path, of_learner)
        progress.resumed(folder.truncate(progress.step))
        checkpoint.rewrite(path, {**values, "run": asdict(progress)})  # else a kill before the next checkpoint loses it
    else:
        progress.resumed(folder.truncate(0))
    folder.write_config(config)
    return progress
