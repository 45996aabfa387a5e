"""The bound on staleness, exhaustively for small schedules and over random histories; and the pace of the groups."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StateError
from penstock.train.rollouts import STARTS_PER_BATCH, Pacer, StalenessWindow
from virtual_time import run_virtual


def ages_of(window: StalenessWindow, first_step: int = 0, lag: random.Random | None = None) -> dict[int, list[int]]:
    """Age of the oldest token each group could have, by group, when submission is as early as the rule allows.

    Groups complete in order, or at random where `lag` is given; those of which a step cannot do without, in time.
    """
    submitted = dict.fromkeys(window.take(), window.version)
    ages: dict[int, list[int]] = {}
    for step in range(first_step, window.total_steps):
        trainer_version = window.start_version + step
        assert window.step == step
        done: set[int] = set() if lag else set(window.outstanding)
        while (batch := window.batch(done)) is None:
            assert lag
            assert window.outstanding.keys() - done, "all are done, and no batch"
            done.add(lag.choice(sorted(window.outstanding.keys() - done)))
        assert len(batch) == window.groups_per_batch
        window.trained(batch)
        for group in batch:
            ages.setdefault(trainer_version - submitted[group], []).append(group)
        window.commit(trainer_version + 1)
        submitted.update(dict.fromkeys(window.take(), window.version))
    assert not window.outstanding
    return ages


@pytest.mark.parametrize(
    ("groups", "staleness", "steps", "start"),
    list(itertools.product((1, 2, 5), (0, 1, 2, 4), (1, 2, 7), (0, 3))),
)
def test_the_bound_holds_and_is_reached(groups: int, staleness: int, steps: int, start: int) -> None:
    window = StalenessWindow(groups, staleness, steps, start_version=start, version=start)
    ages = ages_of(window)
    assert max(ages) == min(staleness, steps - 1)
    assert window.next_group == steps * groups


def test_the_rule_counts_versions_in_force_from_the_start_version() -> None:
    window = StalenessWindow(groups_per_batch=4, max_staleness=2, total_steps=100, start_version=10, version=10)
    assert window.take(ahead=0) == [*range(4)]
    assert window.take() == [*range(4, 12)]
    window.commit(11)
    assert window.take() == [*range(12, 16)]


def test_a_long_group_is_carried_over_until_it_is_due() -> None:
    window = StalenessWindow(groups_per_batch=2, max_staleness=2, total_steps=9)
    window.take()
    done = {*range(1, 6)}  # group 0 is long
    for step, batch in enumerate(([1, 2], [3, 4])):
        assert window.batch(done) == batch
        window.trained(batch)
        done -= {*batch}
        window.commit(step + 1)
        done |= {*window.take()}
    assert window.batch(done) is None, "it was submitted under version 0"
    assert window.awaited()[0] == 0
    done.add(0)
    assert window.batch(done) == [0, 5]


def test_a_version_that_does_not_follow_is_refused() -> None:
    window = StalenessWindow(groups_per_batch=4, max_staleness=2, total_steps=9)
    window.commit(1)
    for version in (0, 1, 3):
        with pytest.raises(StateError, match="go up by one"):
            window.commit(version)


@given(
    groups=st.integers(1, 5),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 8),
    cut=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_completion_in_any_order_makes_no_token_too_old_and_loses_no_group(
    groups: int, staleness: int, steps: int, cut: int, seed: int
) -> None:
    """A run that is cut off after some steps, and goes on from there, with groups that complete in any order."""
    cut = min(cut, steps)
    first = StalenessWindow(groups, staleness, cut)
    lag = random.Random(seed)
    early = ages_of(first, lag=lag)
    first.total_steps = steps
    carried = sorted(first.take())  # in flight at the kill
    next_group = cut * groups + len(carried)
    second = StalenessWindow(groups, staleness, steps, version=cut, next_group=next_group, carried=carried)
    late = ages_of(second, first_step=cut, lag=lag)
    assert max([*early, *late], default=0) <= staleness
    trained = [*itertools.chain(*early.values()), *itertools.chain(*late.values())]
    assert sorted(trained) == list(range(steps * groups))


# --- the pace --------------------------------------------------------------------------------------------------------

PACED = 32


def starts(busy_s: float, hurry_after_s: float | None = None, hurry: range = range(PACED)) -> list[float]:
    """Virtual time at which each of the groups got its turn."""

    async def main(_clock) -> list[float]:
        loop = asyncio.get_running_loop()
        pacer = Pacer()
        pacer.busy_s = busy_s
        began = loop.time()

        async def one(group: int) -> float:
            await pacer.turn(group, group, PACED)
            return loop.time() - began

        tasks = [asyncio.create_task(one(group)) for group in range(PACED)]
        if hurry_after_s is not None:
            await asyncio.sleep(hurry_after_s)
            pacer.hurry(hurry)
        return [await task for task in tasks]

    return run_virtual(main)


def test_portions_are_spread_evenly_and_in_order():
    times = starts(8.0)
    assert times == sorted(times)
    assert sorted(set(times)) == [i + 0.5 for i in range(STARTS_PER_BATCH)]
    assert all(times.count(t) == PACED // STARTS_PER_BATCH for t in times)


def test_hurried_groups_start_now_and_later_ones_keep_their_turn():
    times = starts(8.0, hurry_after_s=2.0, hurry=range(16))
    assert max(times[:16]) == 2.0
    assert times[16:] == starts(8.0)[16:]
