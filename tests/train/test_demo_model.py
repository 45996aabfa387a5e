"""The model that the demo starts from, and the script that makes it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from random_trajectories import score
from transformers import AutoModelForCausalLM, AutoTokenizer

from char_tokenizer import save_char_tokenizer
from penstock.config import TrainConfig
from penstock.rollout.reasoning_gym_env import ReasoningGymEnvironment
from penstock.train.grpo import Trainee
from penstock.train.learner import LocalLearner

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "sorter-0.8m"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo_model", ROOT / "scripts" / "make_demo_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_has_half_learned_to_sort(script: ModuleType):
    """As its README says: 42.8% greedy, exact; here on 256 tasks of another draw (3 standard errors: 9%)."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    environment = ReasoningGymEnvironment(seed=1, **script.DATASET)
    accuracy = script.greedy_accuracy(model, tokenizer, environment, environment.heldout_tasks(256))
    assert 0.33 < accuracy < 0.53
    assert 700_000 < model.num_parameters() < 900_000


def test_its_tokenizer_is_the_one_the_code_writes(tmp_path: Path):
    assert (
        save_char_tokenizer(tmp_path, max_length=512) == json.loads((MODEL / "config.json").read_text())["vocab_size"]
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((MODEL / name).read_text()) == json.loads((tmp_path / name).read_text())


def test_the_learner_takes_it(script: ModuleType):
    config = TrainConfig(micro_batch_tokens=2048)
    trainee = Trainee(LocalLearner(str(MODEL), config, seed=0), config)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    task = ReasoningGymEnvironment(seed=0, **script.DATASET).train_task(0)
    right = [*tokenizer.encode(task.metadata["answer"]), tokenizer.eos_token_id]
    prompt = tokenizer.encode(task.prompt)
    assert sum(score(trainee, prompt, right)) > sum(score(trainee, prompt, right[::-1]))


def test_the_script_writes_a_model_that_loads(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--out", str(tmp_path), "--until", "0", "--heldout", "16", "--threads", "1"]
    monkeypatch.setattr(script, "WINDOW", 2)
    monkeypatch.setattr(sys, "argv", ["make_demo_model.py", *arguments])
    script.main()
    assert "held-out greedy exact accuracy, n=16" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in MODEL.iterdir()} - {"README.md"}
