"""A learner process whose thread does not come back from an optimiser step of the learning rate `HANGS`."""

from __future__ import annotations

import sys
import threading
from typing import Any

from penstock.tinker import learner_process
from penstock.tinker.children import run_child
from penstock.tinker.models import Models

HANGS = 0.123
step = Models.step


def hanging(self: Models, name: str, adam: Any) -> Any:
    if adam.learning_rate == HANGS:
        threading.Event().wait()
    return step(self, name, adam)


if __name__ == "__main__":
    Models.step = hanging  # type: ignore[method-assign]
    sys.exit(run_child(learner_process._serve))
