"""`python -m penstock.train.rank`: a rank of a sharded learner, other than rank 0, until that one stops or dies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping

from penstock.errors import PenstockError
from penstock.process import watch_lifeline

_NEEDED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES = _NEEDED | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
"""Of what else torchrun sets."""


def take_launched(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Take torchrun's variables out of the environment; empty if this process was not started by it.

    Engines are started with what remains: a vLLM that finds them would take itself for a rank of the learner.
    """
    if not environment.keys() >= _NEEDED:
        return {}
    ours = [name for name in environment if name in _NAMES or name.startswith(_PREFIXES)]
    return {name: environment.pop(name) for name in ours}


def on_one_host(launched: Mapping[str, str]) -> bool:
    """Whether torchrun started all ranks here."""
    return launched.get("LOCAL_WORLD_SIZE") == launched["WORLD_SIZE"]


def follow(place: Mapping[str, str], *, one_host: bool) -> int:
    """Do what rank 0 says, to its end; returns the exit status.

    Args:
        place: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and others of torchrun's.
        one_host: all ranks are on this host.
    """
    # Seconds: torch.
    from penstock.train.rank_group import RankGroup, place_of  # noqa: PLC0415
    from penstock.train.ranked import serve  # noqa: PLC0415

    try:
        group = RankGroup(place_of(place), one_host=one_host)
        serve(group)
    except (PenstockError, RuntimeError) as error:  # of torch: a lost peer, no memory left
        sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        os._exit(1)  # the interpreter's end would wait for collectives that never end
    group.close()
    return 0


if __name__ == "__main__":
    watch_lifeline()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    sys.exit(follow(os.environ, one_host=True))
