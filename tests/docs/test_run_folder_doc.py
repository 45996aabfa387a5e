"""docs/reference/run-folder.md names every file and every key of metrics.jsonl that a run writes, and no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "train"))
PAGE = ROOT / "docs" / "reference" / "run-folder.md"
NOT_HERE = {"wandb", "seconds/sleep", "replayed_share", "agent/failed", "agent/breaks/CAUSE", "logprob_difference"}
"""A tracker's, of engines on GPUs, of agents (`tests/train/test_agent_training.py`), and of engines that are not
simulated (`tests/e2e/test_real_demo.py`)."""
SOMETIMES = {"learner/logprob_diff_kv_kept", "update/tokens_lost"}
"""Of a request that was in flight at the right time, and of a measurement that was done in time."""


def documented(text: str) -> dict[str, bool]:
    """What the table of a part of the page names, and whether it is always there."""
    rows = (line.split("|") for line in text.splitlines() if line.startswith("| `"))
    return {cells[1].strip(" `"): not cells[-3].strip() for cells in rows}


@pytest.fixture(scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training_setup import config_of, save_nano_model

    from char_tokenizer import save_char_tokenizer
    from penstock.config import RunConfig
    from penstock.observe.summary import Reporter
    from penstock.train.run import run

    path = tmp_path_factory.mktemp("run")
    model = save_nano_model(path / "model")
    save_char_tokenizer(model, max_length=64, alphabet="0123456789=th")
    config = config_of(
        model,
        engine={"profile": "sim", "max_model_len": 64, "extra_args": {"vocab-size": 96, "tokens-per-second": 500.0}},
        environment={"name": "training_setup:Letters"},
        train={"steps": 4, "kl_coefficient": 0.1, "entropy_coefficient": 0.1},
        eval={"every": 2},
    )
    config = RunConfig.model_validate({**config.model_dump(), "run_dir": path, "trackers": ["tensorboard"]})
    await run(config, resume=False, reporter=Reporter())
    return path / config.name


def test_files_are_those_of_a_run(folder: Path) -> None:
    files = documented(PAGE.read_text().partition("## metrics.jsonl")[0])
    assert {path.name for path in folder.iterdir()} == files.keys() - NOT_HERE


def test_keys_are_those_of_a_run(folder: Path) -> None:
    from penstock.observe.run_folder import RunFolder

    rows = [{re.sub(r"staleness/\d+$", "staleness/K", key) for key in row} for row in RunFolder.open(folder).metrics()]
    keys = documented(PAGE.read_text().partition("## metrics.jsonl")[2])
    assert set().union(*rows) | SOMETIMES == keys.keys() - NOT_HERE
    for row in rows:
        assert {key for key, always in keys.items() if always} <= row
