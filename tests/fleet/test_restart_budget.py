"""The budget of restarts in virtual time."""

from __future__ import annotations

from penstock.fleet.supervise import RestartBudget, keep_running


class Hand:
    """A clock that is turned by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_restart_counts_no_more_when_its_window_has_passed() -> None:
    clock = Hand()
    budget = RestartBudget(2, 100.0, 1.0, clock)
    assert budget.spend() == 1.0
    clock.now += 60.0
    assert budget.spend() == 2.0
    assert not budget.left()
    clock.now += 39.0
    assert budget.spend() is None
    clock.now += 1.0
    assert budget.left(), "one of the two is left in the window"
    assert budget.spend() == 4.0, "and it has not been well for a window"
    clock.now += 1000.0
    assert budget.spend() == 1.0, "all is forgotten"


def test_without_a_limit_it_goes_on_for_ever_and_waits_two_minutes_at_most() -> None:
    clock = Hand()
    budget = RestartBudget(None, 600.0, 1.0, clock)
    waits = []
    for _ in range(1000):
        waits.append(budget.spend())
        clock.now += (waits[-1] or 0.0) + 11.0  # it is killed 11 s after each start
    assert waits[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0]
    assert set(waits[8:]) == {120.0}
    clock.now += 600.0
    assert budget.spend() == 1.0, "it was well for a window"


async def test_a_start_longer_than_the_window_is_no_time_in_which_it_was_well() -> None:
    clock, waits = Hand(), []
    budget = RestartBudget(None, 100.0, 1.0, clock)

    async def dies() -> None:
        clock.now += 5.0

    async def starts() -> bool:
        clock.now += 150.0
        return True

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        waits.append(seconds)
        if len(waits) == 5:
            budget.max_restarts = 0

    await keep_running(dies, starts, budget, sleep)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
