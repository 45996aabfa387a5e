"""A scheduler for engines of tests: requests stop at a number of tokens while a file says so (see `hold.py`).

It is vLLM's own scheduler in all else. Engines find this module by PYTHONPATH (`conftest.py`) and load it by vLLM's
option `--scheduler-cls`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

IDLE_S = 0.005
"""Between two steps in which everything is held; the core would spin."""

Own: Any = Scheduler if current_platform.is_cpu() else AsyncScheduler
"""The class that vLLM takes by default."""


class HeldScheduler(Own):
    """Leaves running requests out of a step once they have as many tokens as the file `limit` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(self.vllm_config.additional_config["hold"])
        self._limit = str(self._folder / "limit")
        self._said = ""

    def schedule(self, *args: Any) -> Any:
        try:
            with open(self._limit) as file:  # noqa: PTH123 - before every step: half the time of a Path's
                move, limit = map(int, file.read().split())
        except FileNotFoundError:
            return super().schedule(*args)
        held = [one for one in self.running if one.num_output_tokens + one.num_output_placeholders >= limit]
        self._say(f"{move} {len(held)}")
        self.running = [one for one in self.running if one not in held]
        try:
            output = super().schedule(*args)
        finally:
            self.running = held + self.running
        if not output.total_num_scheduled_tokens:
            time.sleep(IDLE_S)
        return output

    def _say(self, text: str) -> None:
        """Tell the test how many requests stand at the limit, and which one that was."""
        if text != self._said:
            self._said = text
            new = self._folder / f"new-{os.getpid()}"
            new.write_text(text)
            new.rename(self._folder / f"held-{os.getpid()}")
