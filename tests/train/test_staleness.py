"""The bound on staleness: exhaustively for small schedules, and over random histories."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StateError
from penstock.train.schedule import StalenessWindow


def ages_of(window: StalenessWindow, first_step: int = 0) -> dict[int, list[int]]:
    """Age of the oldest token each group could have, by group, when submission is as early as the rule allows."""
    submitted = dict.fromkeys(window.take(), window.version)
    ages: dict[int, list[int]] = {}
    for step in range(first_step, window.total_steps):
        trainer_version = window.start_version + step
        for group in window.batch(step):
            ages.setdefault(trainer_version - submitted[group], []).append(group)
        window.commit(trainer_version + 1)
        submitted.update(dict.fromkeys(window.take(), window.version))
    assert sorted(submitted) == list(range(first_step * window.groups_per_batch, window.next_group))
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


def test_staleness_zero_is_the_synchronous_schedule() -> None:
    window = StalenessWindow(groups_per_batch=3, max_staleness=0, total_steps=2)
    assert window.take() == range(3)
    assert window.take() == range(3, 3)
    window.commit(1)
    assert window.take() == range(3, 6)
    window.commit(2)
    assert not window.take()


def test_the_rule_counts_versions_in_force_from_the_start_version() -> None:
    window = StalenessWindow(groups_per_batch=4, max_staleness=2, total_steps=100, start_version=10, version=10)
    assert window.limit == 12
    window.commit(11)
    assert window.limit == 16


def test_a_version_that_does_not_follow_is_refused() -> None:
    window = StalenessWindow(groups_per_batch=4, max_staleness=2, total_steps=9)
    window.commit(1)
    for version in (0, 1, 3):
        with pytest.raises(StateError, match="go up by one"):
            window.commit(version)


@given(
    groups=st.integers(1, 6),
    staleness=st.integers(0, 5),
    steps=st.integers(1, 12),
    version=st.integers(0, 40),
    data=st.data(),
)
def test_a_resumed_window_goes_on_within_the_bound(
    groups: int, staleness: int, steps: int, version: int, data: st.DataObject
) -> None:
    done = data.draw(st.integers(0, min(steps, version)))
    window = StalenessWindow.after(
        done, groups_per_batch=groups, max_staleness=staleness, total_steps=steps, version=version
    )
    ages = ages_of(window, first_step=done)
    assert max(ages, default=0) <= staleness
    assert sorted(itertools.chain(*ages.values())) == list(range(done * groups, steps * groups))


@given(groups=st.integers(1, 5), staleness=st.integers(0, 4), steps=st.integers(1, 8), data=st.data())
def test_late_submission_and_late_completion_never_make_a_token_too_old(
    groups: int, staleness: int, steps: int, data: st.DataObject
) -> None:
    """Groups are taken at any time the rule allows, and their tokens made under any version from then on."""
    window = StalenessWindow(groups, staleness, steps)
    versions: dict[int, set[int]] = {}
    open_groups: list[int] = []
    for step in range(steps):
        for group in window.take():
            open_groups.append(group)
            versions[group] = set()
        batch = window.batch(step)
        for group in open_groups:  # what runs makes tokens under the version in force; what is due must have finished
            if group in batch or data.draw(st.booleans()):
                versions[group].add(window.version)
        for group in batch:
            open_groups.remove(group)
            assert all(0 <= step - made <= staleness for made in versions.pop(group))
        window.commit(step + 1)
    assert not versions
    assert not open_groups
