"""`examples/AGENT.yaml`: an agent that learns over several turns; in a short form on a simulated engine, and whole."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_real_demo import trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.config import TrainConfig, load_config
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter
from penstock.train.learner import LocalLearner
from penstock.train.run import run

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "AGENT.yaml"
MODEL = ROOT / "examples" / "models" / "guesser-0.8m"


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    sys.path.append(str(ROOT / "scripts"))
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "make_agent_model.py")))


def found(script: SimpleNamespace, model: torch.nn.Module, *, feedback: bool) -> float:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return script.success(model, tokenizer, script.Guess(seed=0, feedback=feedback))


def test_the_model_knows_the_game_and_plays_it_with_care(script: SimpleNamespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert 0.30 < found(script, model, feedback=True) < 0.43
    assert found(script, model, feedback=False) < 0.20


async def test_it_starts_and_takes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = (
        "engine.profile=sim", "engine.extra_args.vocab-size=100", "engine.extra_args.eos-share=0.3",
        "rollout.groups_per_batch=2", "train.steps=2", "eval.size=4", f"run_dir={tmp_path}",
    )  # fmt: skip
    summary = await run(load_config(AGENT, short), resume=False, reporter=Reporter())
    assert summary.steps == 2
    records = RunFolder.open(tmp_path / "agent").trajectories()
    assert records
    assert all(record["prompt"].endswith("?") for record in records)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_an_agent_learns_by_what_it_is_answered(tmp_path: Path, script: SimpleNamespace, seed: int) -> None:
    """At least 20 points in at most 5 minutes; the same model without answers finds at least 20 points less."""
    began = time.monotonic()
    await trained(str(AGENT), f"seed={seed}", f"run_dir={tmp_path}", seconds=800)
    assert time.monotonic() - began <= 300
    summary = json.loads((tmp_path / "agent" / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.20
    assert summary["logprob_difference"] <= 1e-4

    learner = LocalLearner(str(MODEL), TrainConfig(), seed=0)
    step = summary["steps"]
    learner.load(None, tmp_path / "agent" / "checkpoints" / f"step-{step:08}", {"version": step})
    learnt = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    learnt.load_state_dict(dict(learner.weights(None)), strict=False)
    with_answers = found(script, learnt, feedback=True)
    assert with_answers == pytest.approx(summary["accuracy_after"], abs=0.01)  # the engine has the learner's weights
    assert with_answers - found(script, learnt, feedback=False) >= 0.20
