"""A training run on a simulated engine in a process of its own.

Arguments: `MODEL FOLDER STEPS STAND_STILL_AT [--resume]`.

Says `step N` on stdout when step N is recorded, and `done` at the end. At step `STAND_STILL_AT` it stands still, with
rollouts in flight, so that it can be killed there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a script's path has its own folder alone
from training_setup import config_of, run_on_sim

from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter


class Talker(Reporter):
    def __init__(self, stand_still_at: int) -> None:
        self.stand_still_at = stand_still_at

    def on_step(self, metrics: Mapping[str, float]) -> None:
        print(f"step {metrics['step']:.0f}", flush=True)
        if metrics["step"] == self.stand_still_at:
            signal.pause()


def main() -> None:
    model, path, steps, stand_still_at, *flags = sys.argv[1:]
    resume = "--resume" in flags
    config = config_of(model, train={"steps": int(steps), "checkpoint_every": 3})
    folder = RunFolder.open(Path(path)) if resume else RunFolder.create(Path(path), config)
    asyncio.run(run_on_sim(config, folder, reporter=Talker(int(stand_still_at)), resume=resume))
    print("done", flush=True)


main()
