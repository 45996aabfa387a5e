"""One run: steps by a schedule, evaluations, checkpoints and records (R30).

`penstock.train.schedules` has the order of a step. Everything else (HTTP, scoring, more groups) runs on the same event
loop, which wakes when a group is done. Only the trace polls: it asks for requests in flight twenty times a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.engine.layouts import read_shape
from penstock.errors import MissingCapabilityError, PenstockError, StateError, WeightsError
from penstock.fleet.fleet import Fleet
from penstock.observe.run_folder import RunFolder, pick, record_of
from penstock.observe.summary import Reporter, Summary
from penstock.observe.trace import LEARNER, Loads, Tracer
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import Generator, Trajectory
from penstock.threads import abandonable
from penstock.train.grpo import Trainee
from penstock.train.resume import Progress, save_checkpoint, take_up
from penstock.train.rollouts import Rollouts, greedy_accuracy
from penstock.train.schedules import SCHEDULES, Parts, to_the_end
from penstock.train.staleness import StalenessWindow
from penstock.train.step_metrics import (
    LogprobAlarm,
    Stopwatch,
    batch_metrics,
    learner_metrics,
    policy_tokens,
    replayed_share,
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
    run = _Run(config, client, trainee, generator, environment, folder, reporter, progress, loads)
    for step, accuracy in folder.evaluations().items():
        run.report_evaluation(step, accuracy)
    await run.put_in_force()
    # Called here, while no rollout uses the environment.
    run.heldout = await abandonable(partial(environment.heldout_tasks, config.eval.size))
    await run.evaluate_if_due()
    await run.train_to_the_end()
    return run.summarize()


@dataclass(slots=True)
class _Run:
    """State of one run."""

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
    window: StalenessWindow = field(init=False)
    alarm: LogprobAlarm = field(init=False)
    heldout: Sequence[Task] = ()
    recovering: asyncio.Task[UpdateReport] | None = None
    """Waits for the cost of the last update."""
    generated_before: int = field(init=False)
    """`progress.generated_tokens` at the last recorded step."""

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.progress.seconds)
        self.tracer = Tracer(self.watch.now, self.loads)
        self.watch.on_span = partial(self.tracer.add, LEARNER)
        self.alarm = LogprobAlarm(self.config.train.logprob_alarm, simulated=self.config.engine.profile == "sim")
        groups, step, carried = self.config.rollout.groups_per_batch, self.progress.step, self.progress.carried
        self.window = StalenessWindow(
            groups,
            self.config.train.staleness,
            self.config.train.steps,
            start_version=self.trainee.version - step,
            version=self.trainee.version,
            next_group=step * groups + len(carried),
            carried=carried,
        )
        self.generated_before = self.progress.generated_tokens

    async def put_in_force(self) -> None:
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

    async def evaluate_if_due(self) -> None:
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
        self.report_evaluation(step, accuracy)

    async def train_to_the_end(self) -> None:
        """Run all remaining steps and the rollouts. The first failure of either ends both."""
        watching = asyncio.create_task(self.tracer.watch(), name="tracer")
        try:
            async with asyncio.TaskGroup() as tasks:
                self.reporter.on_phase("train")
                self.watch.lap()
                rollouts = Rollouts(self.config, self.generator, self.environment, self.progress, self.window, tasks)
                parts = Parts(rollouts, self.trainee, self.client, self.watch, self.tracer, self.config.train.staleness)
                while self.progress.step < self.config.train.steps:
                    await self._step(parts)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            log.error("run ended after step %d: %s", self.progress.step, first)  # noqa: TRY400 - it is raised
            raise first from first.__cause__
        finally:
            watching.cancel()
            if self.recovering is not None:
                self.recovering.cancel()

    def summarize(self) -> Summary:
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

    async def _step(self, parts: Parts) -> None:
        learned, report = await SCHEDULES[self.config.train.schedule](parts)
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
        await self.evaluate_if_due()

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
        self.progress.carried = sorted(self.window.outstanding)
        progress = asdict(self.progress)  # copied here and not in the thread, because rollouts go on counting
        with self.watch.measure("checkpoint"):
            await to_the_end(asyncio.to_thread(save_checkpoint, self.folder, self.trainee, progress))

    def report_evaluation(self, step: int, accuracy: float) -> None:
        """Report a held-out accuracy, measured now or before a resume."""
        name = "before" if step == 0 else "after" if step == self.config.train.steps else f"step {step}"
        self.reporter.on_eval(name, accuracy)
