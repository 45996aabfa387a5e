"""A run's figures to TensorBoard or Weights & Biases (`trackers`), beside the run folder.

Both work without a network.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.config import RunConfig
from penstock.errors import UserError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.types import UpdateReport

log = logging.getLogger(__name__)

HELD_OUT = "held_out_accuracy"


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, config: RunConfig, folder: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

        # What a kill lost comes again, and so do evaluations from before it: TensorBoard would draw both.
        self._begins = step
        self._writer: Any = SummaryWriter(str(folder.path / "tensorboard"), purge_step=step + 1 if step else None)
        self._writer.add_text("config", f"```\n{config.model_dump_json(indent=2)}\n```")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            if step >= self._begins:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, its files in RUN/wandb; WANDB_MODE=offline keeps them there, WANDB_PROJECT names it.

    A resumed run is another one in the group of the run's name.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, step: int) -> None:
        del step  # nothing of another run is lost
        self._run: Any = import_module("wandb").init(
            dir=str(folder.path), name=config.name, group=config.name, config=config.model_dump(mode="json")
        )
        self._run.define_metric("*", step_metric="step")  # evaluations are logged apart, and would count as steps

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | Wandb
TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Reporters(Reporter):
    """Passes each event on to a reporter, and a run's figures to trackers.

    A tracker that fails is left out from then on, and the log says so: the run's own records have everything.
    """

    def __init__(self, first: Reporter, trackers: Mapping[str, Tracker], last_step: int) -> None:
        self._first = first
        self._trackers = dict(trackers)
        self._steps = {"before": 0, "after": last_step}

    def on_phase(self, name: str) -> None:
        self._first.on_phase(name)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self._first.on_step(metrics)
        self._log(metrics, int(metrics["step"]))

    def on_update(self, report: UpdateReport) -> None:
        self._first.on_update(report)

    def on_eval(self, name: str, accuracy: float) -> None:
        self._first.on_eval(name, accuracy)
        step = self._steps[name] if name in self._steps else int(name.removeprefix("step "))
        self._log({HELD_OUT: accuracy}, step)

    def on_warning(self, text: str) -> None:
        self._first.on_warning(text)

    def on_end(self, summary: Summary) -> None:
        self._first.on_end(summary)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        for name, tracker in tuple(self._trackers.items()):
            try:
                with _foreign_code(name):
                    tracker.log(figures, step)
            except UserError as error:
                log.warning("%s; it gets no more figures", error)
                del self._trackers[name]


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError where the package of a tracker is missing."""
    for name in names:
        if (found := find_spec(name)) is None or found.origin is None:  # the latter: a folder of wandb's files here
            raise UserError(f"trackers: {name} is not installed; pip install 'penstock[{name}]', or leave it out")


@contextmanager
def tracked(reporter: Reporter, config: RunConfig, folder: RunFolder, step: int = 0) -> Generator[Reporter]:
    """Report to the trackers of `config` as well, until the block ends. UserError: one of them does not start.

    A resumed run goes on after `step`.
    """
    with ExitStack() as closing:
        trackers: dict[str, Tracker] = {}
        for name in config.trackers:
            with _foreign_code(name, "; leave it out, or have wandb work offline by WANDB_MODE=offline"):
                trackers[name] = TRACKERS[name](config, folder, step)
            closing.callback(_close, name, trackers[name])
        yield Reporters(reporter, trackers, config.train.steps) if trackers else reporter


def _close(name: str, tracker: Tracker) -> None:
    try:
        with _foreign_code(name):
            tracker.close()
    except UserError as error:  # the run is done
        log.warning("%s at its end; it may lack figures", error)


@contextmanager
def _foreign_code(name: str, advice: str = "") -> Generator[None]:
    try:
        yield
    except Exception as error:  # a library's own errors, of any type
        raise UserError(f"trackers: {name} failed ({' '.join(str(error).split())}){advice}") from error
