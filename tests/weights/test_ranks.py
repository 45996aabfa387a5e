"""Ranks of a group over engines that differ in size."""

from __future__ import annotations

import math

import pytest

from penstock.errors import WeightsError
from penstock.weights.broadcast import rank_offsets, world_size


def test_engines_of_one_size() -> None:
    assert rank_offsets([(2, 1, 1), (2, 1, 1), (2, 1, 1)]) == [1, 3, 5]
    assert world_size([(2, 1, 1), (2, 1, 1), (2, 1, 1)]) == 7


def test_an_offset_counts_the_workers_of_the_engines_before_it_and_not_its_index_times_its_own() -> None:
    """Index times own size (as in loops of the field) would give 1, 3, 3 and 9: two engines on one rank."""
    layouts = [(4, 1, 1), (2, 1, 1), (1, 1, 1), (2, 2, 2)]
    assert rank_offsets(layouts) == [1, 5, 7, 8]
    assert world_size(layouts) == 16


def test_every_rank_belongs_to_exactly_one_worker() -> None:
    layouts = [(1, 2, 1), (4, 1, 2), (1, 1, 1), (2, 2, 1)]
    taken = [0]
    for offset, layout in zip(rank_offsets(layouts), layouts, strict=True):
        taken += range(offset, offset + math.prod(layout))
    assert taken == list(range(world_size(layouts)))


def test_no_engine_leaves_the_trainer_alone() -> None:
    assert rank_offsets([]) == []
    assert world_size([]) == 1


def test_an_engine_without_workers_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"engine 1 of 2 has \(2, 0, 1\)"):
        rank_offsets([(1, 1, 1), (2, 0, 1)])
