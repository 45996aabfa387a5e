"""Sends a run's figures to TensorBoard or Weights & Biases too (`trackers`).

Both work without a network.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.config import RunConfig
from penstock.errors import UserError
from penstock.observe.run_folder import HELD_OUT, RunFolder

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes event files in RUN/tensorboard."""

    def __init__(self, config: RunConfig, folder: RunFolder, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

        path = folder.path / "tensorboard"
        self.is_new = not path.is_dir()
        # A resumed run repeats the steps that a kill lost. TensorBoard would draw both.
        self._writer: Any = SummaryWriter(str(path), purge_step=0 if step is None else step + 1)
        self._writer.add_text("config", f"```\n{config.model_dump_json(indent=2)}\n```")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if HELD_OUT in figures:
            self._writer.flush()  # no later step repeats an evaluation that a kill loses

    def close(self) -> None:
        """Write the figures that are still buffered."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases with files in RUN/wandb. WANDB_MODE=offline sends none, WANDB_PROJECT sets the project.

    A resumed run is a new one in the group of the run's name. It gets the evaluations of the runs before it.
    """

    is_new = True

    def __init__(self, config: RunConfig, folder: RunFolder, step: int | None) -> None:
        del step  # a resume starts a new run, so there is nothing to purge
        self._run: Any = import_module("wandb").init(
            dir=str(folder.path), name=config.name, group=config.name, config=config.model_dump(mode="json")
        )
        self._run.define_metric("*", step_metric="step")  # evaluations are logged separately and would count as steps

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | Wandb
TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is missing."""
    for name in names:
        if (found := find_spec(name)) is None or found.origin is None:  # without origin: a folder named wandb
            raise UserError(f"trackers: {name} is not installed; pip install 'penstock[{name}]', or leave it out")


@contextmanager
def tracked(config: RunConfig, folder: RunFolder, step: int | None = None) -> Generator[None]:
    """Send what the folder records to the trackers of `config`. UserError: a tracker does not start.

    A resumed run continues after `step`. A tracker that starts at a resume also gets the evaluations so far. A tracker
    that fails is dropped with a log message; the run folder still has every figure.
    """
    with ExitStack() as closing:
        trackers: dict[str, Tracker] = {}
        for name in config.trackers:
            with _foreign_code(name, "; leave it out, or have wandb work offline by WANDB_MODE=offline"):
                trackers[name] = TRACKERS[name](config, folder, step)
            closing.callback(_close, name, trackers[name])
        for at, accuracy in folder.evaluations().items():
            if step is not None and at <= step:
                _log(trackers, {HELD_OUT: accuracy}, at, only_new=True)
        closing.callback(setattr, folder, "on_figures", folder.on_figures)
        folder.on_figures = partial(_log, trackers)
        yield


def _log(trackers: dict[str, Tracker], figures: Mapping[str, float], step: int, *, only_new: bool = False) -> None:
    for name, tracker in tuple(trackers.items()):
        if only_new and not tracker.is_new:
            continue
        try:
            with _foreign_code(name):
                tracker.log(figures, step)
        except UserError as error:
            log.warning("%s; it gets no more figures", error)
            del trackers[name]


def _close(name: str, tracker: Tracker) -> None:
    try:
        with _foreign_code(name):
            tracker.close()
    except UserError as error:  # the run itself is complete
        log.warning("%s at its end; it may lack figures", error)


@contextmanager
def _foreign_code(name: str, advice: str = "") -> Generator[None]:
    try:
        yield
    except Exception as error:  # a library may raise any type of error
        raise UserError(f"trackers: {name} failed ({' '.join(str(error).split())}){advice}") from error
