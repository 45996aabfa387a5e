"""The schedules of a run (`train.schedule`), one file each, and their layouts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import torch

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.errors import ConfigError
from penstock.train.parts import Learned, Parts
from penstock.train.schedules import colocated, fully_async, one_step_off, synchronous

log = logging.getLogger(__name__)

Schedule = Callable[[Parts], Awaitable[tuple[Learned, UpdateReport]]]
"""One step of a run: rollouts, learning and an update, in the schedule's order."""

SCHEDULES: Mapping[str, Schedule] = {
    "async": fully_async.step,
    "one_step_off": one_step_off.step,
    "sync": synchronous.step,
    "colocated": colocated.step,
}


def check_schedule(config: RunConfig) -> None:
    """Refuse a schedule that other keys or the layout rule out, before any start.

    Raises:
        ConfigError: engines that cannot sleep, next to a colocated learner; `max_staleness` 0 with `one_step_off`; or
            engines on the GPUs of a learner that needs its own.
    """
    engine, fleet, schedule = config.engine, config.fleet, config.train.schedule
    if schedule == "one_step_off" and config.train.max_staleness == 0:
        raise ConfigError(
            "train.schedule: one_step_off trains on tokens of the version before and max_staleness is 0; choose 1 or "
            "more, or sync"
        )
    if schedule == "colocated" and fleet.engines and not engine.enable_sleep_mode:
        raise ConfigError(
            "train.schedule: colocated has the engines sleep while the learner trains; set "
            "engine.enable_sleep_mode: true, or choose another schedule"
        )
    # The layout of other launchers and of the simulated engine is unknown here.
    if not fleet.attach and fleet.launcher == "local" and engine.profile != "sim":
        _check_gpus(config)


def _check_gpus(config: RunConfig) -> None:
    engine, fleet, schedule = config.engine, config.fleet, config.train.schedule
    gpus = torch.cuda.device_count() if engine.profile != "cpu" and torch.cuda.is_available() else 0
    if schedule == "colocated":
        if not gpus:
            raise ConfigError(
                "train.schedule: colocated needs engines that sleep, which vLLM can on GPUs only, and these run on "
                "CPUs; choose sync, one_step_off or async"
            )
        return
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    wanted, learner = fleet.engines * ranks, config.train.ranks
    if not gpus or wanted + learner <= gpus:
        return
    problem = (
        f"train.schedule: {schedule} trains while engines hold their GPUs, and {wanted} GPUs of engines and {learner} "
        f"of the learner are more than the {gpus} there are"
    )
    advice = "ask for fewer engines, or choose colocated with engine.enable_sleep_mode: true"
    if schedule != "async":
        raise ConfigError(f"{problem}; {advice}")
    log.warning("%s: they share, and slow each other down; %s", problem, advice)
