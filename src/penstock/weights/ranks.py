"""Ranks of one group of the trainer and the workers of every engine, where engines may differ in size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from penstock.errors import WeightsError

Layout = tuple[int, int, int]
"""TP, PP and DP ranks of one engine."""

TRAINER_RANK = 0


def rank_offsets(layouts: Sequence[Layout]) -> list[int]:
    """Rank of each engine's first worker, shape `[len(layouts)]`: the trainer is rank 0, the engines follow in order.

    Within an engine a worker's rank is the offset + `dp_rank * tp * pp + its rank among the tp * pp of its replica`.

    Raises:
        WeightsError: an engine with no worker.
    """
    return _ends(layouts)[:-1]


def world_size(layouts: Sequence[Layout]) -> int:
    """Ranks of the whole group: the trainer and every worker. Raises as `rank_offsets` does."""
    return _ends(layouts)[-1]


def _ends(layouts: Sequence[Layout]) -> list[int]:
    for place, layout in enumerate(layouts):
        if min(layout) < 1:
            raise WeightsError(f"engine {place} of {len(layouts)} has {layout} TP, PP and DP ranks; each is at least 1")
    return list(accumulate((math.prod(layout) for layout in layouts), initial=TRAINER_RANK + 1))
