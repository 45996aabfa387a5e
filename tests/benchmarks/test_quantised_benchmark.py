"""What `benchmarks/quantised.py` makes of its figures."""

from __future__ import annotations

import quantised


def test_rows_have_the_speed_by_the_unquantised_engine_and_each_gap_below_the_alarm() -> None:
    rows = {row.case: row for row in quantised.rows_of({"none": 100.0, "fp8": 150.0}, {"none": 1e-6, "fp8": 0.2})}
    assert rows["fp8, tokens/s by unquantised"].ratio == 1.5
    assert rows["none, mean |learner - engine| in nats"].ok
    assert not rows["fp8, mean |learner - engine| in nats"].ok
    assert [row.case for row in quantised.rows_of({"fp8": 150.0}, {})] == []
