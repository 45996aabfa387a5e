"""The scenarios that vLLM's CPU build can do, on real engines, and that all schedules learn alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import Fleet
from penstock.train.scenarios.fleets import TOKENS
from penstock.train.scenarios.run import run_scenario
from penstock.train.scenarios.table import SCENARIOS

pytestmark = pytest.mark.vllm

MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
QUICK = ("pause-keep", "http-generator")
"""Without training; the first runs in `make test` too."""
TRAINED = [name for name, each in SCENARIOS.items() if not each.gpus and not each.missing and name not in QUICK]
SCHEDULES = ("non-colocated", "one-step-off", "async")
NOISE = 0.08
"""Difference of held-out accuracies that is let pass: three standard errors of a difference at 512 tasks, 0.03 each."""


@pytest.mark.parametrize("name", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)])
async def test_a_quick_scenario_holds(name, tmp_path, hold, monkeypatch):
    config = SCENARIOS[name].config(profile="cpu", run_dir=tmp_path, model=MODEL, overrides=["fleet.engines=1"])
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"extra_args": hold.extra_args})})
    resume = Fleet.resume_generation

    async def let_go(fleet):
        hold.release()
        await resume(fleet)

    monkeypatch.setattr(Fleet, "resume_generation", let_go)  # before that no request can end
    with hold.at(TOKENS - 1):
        result = await run_scenario(SCENARIOS[name], config)
    assert result.ok, result.row()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in SCHEDULES])
async def test_a_scenario_holds(name, tmp_path):
    result = await run_scenario(SCENARIOS[name], SCENARIOS[name].config(profile="cpu", run_dir=tmp_path, model=MODEL))
    assert result.ok, result.row()


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_schedule_gains_the_same_to_within_noise(tmp_path):
    """Same task, same seed. Colocated needs GPUs; on simulated engines it equals synchronous apart row by row."""
    after = {}
    for name in SCHEDULES:
        config = SCENARIOS[name].config(profile="cpu", run_dir=tmp_path, model=MODEL)
        result = await run_scenario(SCENARIOS[name], config)
        assert result.ok, result.row()
        after[name] = json.loads((tmp_path / name / "summary.json").read_text())["accuracy_after"]
    assert max(after.values()) - min(after.values()) <= NOISE, after
