"""Sleep and wake-up of one engine core, which end no request and resume nothing that something else holds.

vLLM's sleep finishes every request in flight; a client's sleep acts as the pause `keep` (`pause.py`). vLLM's wake-up
resumes the scheduler even if a client has paused it, and after a sleep of level 2 before there are weights. A step
without memory kills the engine.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from penstock.plugin.pause import ASLEEP, WEIGHTS, PauseState
from penstock.rooms import plugged_in

DROPS_WEIGHTS = 2
"""The sleep level whose wake-up restores memory but not weights."""


def sleep(pausing: PauseState, level: int, mode: str) -> Any:
    """`/sleep`: free memory. Return a future if steps are under way."""
    pausing.end_measurement()
    before = set(pausing.holds)
    for reason in ASLEEP - {"scheduling"} if level else ("scheduling",):
        pausing.hold(reason)  # from now on, since copying the weights away takes seconds
    try:
        done = pausing.core.sleep(level, mode)
    except BaseException:
        pausing.holds &= before  # it is awake
        raise
    if level == DROPS_WEIGHTS:
        pausing.hold(WEIGHTS)
    return done


def wake_up(pausing: PauseState, tags: list[str] | None) -> Any:
    """`/wake_up`: restore memory, without vLLM's resume. The core resumes only if nothing else holds it."""
    core, asleep = pausing.core, ASLEEP & pausing.holds
    # If the request includes memory that is already there, vLLM does not restore the rest.
    missing = None if tags is None else [tag for tag in tags if tag in asleep]
    core.resume_scheduler = lambda: None
    try:
        awake = core.wake_up(missing) if missing or tags is None else not asleep
    finally:
        del core.resume_scheduler
    back = asleep if tags is None else asleep & set(tags)
    if WEIGHTS in pausing.holds and "weights" in back:
        core.penstock_rpc(clear_dropped)
    pausing.let_go(*back)
    return awake


def clear_dropped(worker: Any) -> None:
    """Clear the remains of a sleep that dropped the weights, before new weights come.

    vLLM (0.26 to 0.33) drops all memory that was allocated for loading the model, and restores only its buffers.
    """
    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters():
            parameter.zero_()  # padding, which no update fills
    if getattr(worker.model_runner, "lora_manager", None) is not None:
        plugged_in("adapters.copy")(worker)
