"""Lengths that `benchmarks/schedules.py` draws, and what it makes of its results."""

from __future__ import annotations

import statistics

import schedules


def run_of(schedule: str, rate: float, target: float | None = None) -> dict[str, object]:
    gpus = 1 if schedule == "colocated" else 2
    return {"schedule": schedule, "samples_per_second": rate, "target": target, "seconds_to_target": rate, "gpus": gpus}


def test_lengths_are_heavy_tailed_and_of_the_prompt_alone() -> None:
    lengths = [schedules.heavy_tailed(f"prompt {i}", 256) for i in range(2000)]
    assert lengths == [schedules.heavy_tailed(f"prompt {i}", 256) for i in range(2000)]
    assert min(lengths) >= 8
    assert max(lengths) == 256
    assert statistics.median(lengths) <= 16
    assert sum(sorted(lengths)[-200:]) >= 0.3 * sum(lengths), "a tenth of them makes a third of the tokens"


def test_rows_compare_medians_over_seeds_with_the_synchronous_schedule() -> None:
    runs = [run_of("sync", rate) for rate in (1.0, 2.0, 9.0)]
    runs += [run_of("async", 3.0), run_of("one_step_off", 3.0), run_of("colocated", 2.0)]
    runs += [run_of("async", rate, target=0.5) for rate in (7.0, 9.0, 99.0)]
    rows = {row.case: row for row in schedules.rows_of(runs)}
    assert rows["async, samples/s a GPU by sync"].ratio == 1.5
    assert not rows["async, samples/s a GPU by sync"].ok
    assert rows["one_step_off, samples/s a GPU by sync"].ok
    assert rows["colocated, samples/s a GPU by sync"].ratio == 2.0
    assert rows["async, s to the reward, 3 seeds"].ours == 9.0
    assert schedules.rows_of([run_of("async", 3.0)]) == []
