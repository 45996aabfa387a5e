"""`python -m penstock.train.rank`: a sharded learner's rank other than 0. It runs until rank 0 stops or dies."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from penstock.errors import PenstockError
from penstock.process import watch_lifeline

_NEEDED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES = _NEEDED | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
"""Names and prefixes of the variables that torchrun sets."""


def take_launched(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Take torchrun's variables out of the environment; empty if torchrun did not start this process.

    Engines start with the remaining variables. With torchrun's, vLLM would take itself for a rank of the learner.
    """
    if not environment.keys() >= _NEEDED:
        return {}
    ours = [name for name in environment if name in _NAMES or name.startswith(_PREFIXES)]
    return {name: environment.pop(name) for name in ours}


def on_one_host(launched: Mapping[str, str]) -> bool:
    """Whether all ranks were started on this host."""
    return launched.get("LOCAL_WORLD_SIZE") == launched["WORLD_SIZE"]


def report_failure(launched: Mapping[str, str], message: str) -> None:
    """Make torchrun show why this process ended, at the end of its output."""
    if file := launched.get("TORCHELASTIC_ERROR_FILE"):
        shown = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": shown}}))


def follow(place: Mapping[str, str], *, one_host: bool) -> int:
    """Follow rank 0's commands until the end, and return the exit status. `place` has torchrun's variables."""
    # Importing torch takes seconds.
    from penstock.train.rank_group import RankGroup, place_of  # noqa: PLC0415
    from penstock.train.ranked import serve  # noqa: PLC0415

    try:
        group = RankGroup(place_of(place), one_host=one_host)
        serve(group)
    except (PenstockError, RuntimeError) as error:  # RuntimeError from torch: a lost peer, or no memory left
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        report_failure(place, message)
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for collectives that never end
    group.close()
    return 0


if __name__ == "__main__":
    watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(follow(os.environ, one_host=on_one_host(os.environ)))
