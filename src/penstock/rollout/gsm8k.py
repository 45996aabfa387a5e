"""GSM8K from the hub or a folder: school word problems whose answer is one number."""

# pyarrow and huggingface_hub ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from penstock.config import check_on_hub
from penstock.errors import ConfigError
from penstock.rollout.environment import ListedTasks, Task, json_lines

HUB = "openai/gsm8k"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
ANSWER = re.compile(rf"####\s*\$?({NUMBER.pattern})\.?\s*$")
"""Matches the end of a data row's answer."""


class GSM8K(ListedTasks):
    """Trains on the data set's `train` split and holds out `test`. The reward is 1.0 for the right number, else 0.0.

    A response's answer is the first number after its last `####`. Without `####`, it is the last number.

    Args:
        seed: seed of the order of training tasks, which differs in each pass.
        path: hub name, or a folder with `main/train-*.parquet` and `main/test-*.parquet` (as on the hub, needs pyarrow)
            or with `train.jsonl` and `test.jsonl`.
        instruction: text appended to each question.

    Raises:
        ConfigError: the data set does not exist or has another form.
    """

    def __init__(
        self, *, seed: int, path: str = HUB, instruction: str = "\nThink step by step; end with '#### ' and the answer."
    ) -> None:
        folder = Path(path).expanduser()
        folder = folder if folder.is_dir() else _download(path)
        train, test = (
            [
                Task(f"gsm8k/{split}/{row}", question + instruction, {"answer": answer})
                for row, (question, answer) in enumerate(_rows(folder, split))
            ]
            for split in ("train", "test")
        )
        super().__init__(train, seed=seed, heldout=test)

    def reward(self, task: Task, response_text: str) -> float:
        said = NUMBER.findall(response_text.rpartition("####")[2])
        answer = said[0 if "####" in response_text else -1] if said else ""
        return float(bool(answer) and _plain(answer) == task.metadata["answer"])


def _plain(number: str) -> str:
    """Return a number in one form, so that equal numbers have equal text."""
    plain = number.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def _rows(folder: Path, split: str) -> Sequence[tuple[str, str]]:
    """Return question and answer of each problem; the answer is a bare number."""
    lines = folder / f"{split}.jsonl"
    if lines.is_file():
        found = json_lines(lines)
    else:
        found = _parquet(sorted((folder / "main").glob(f"{split}-*.parquet")), folder, split)
    rows = [_problem(row, f"{folder}, row {number} of {split!r}") for number, row in enumerate(found, start=1)]
    if not rows:
        raise ConfigError(f"{folder} has no problem in its split {split!r}")
    return rows


def _problem(row: Any, where: str) -> tuple[str, str]:
    question, answer = (row.get(key) if isinstance(row, dict) else None for key in ("question", "answer"))
    ending = ANSWER.search(answer) if isinstance(answer, str) else None
    if not isinstance(question, str) or not question.strip() or ending is None:
        raise ConfigError(
            f"{where} is none of GSM8K: each has a 'question' in text and an 'answer' that ends in '#### NUMBER', and "
            f"this one is {str(row)[:200]!r}"
        )
    return question, _plain(ending[1])


def _parquet(files: Sequence[Path], folder: Path, split: str) -> list[Any]:
    if not files:
        raise ConfigError(f"{folder} has neither {split}.jsonl nor main/{split}-*.parquet")
    try:
        import pyarrow.parquet as pq  # noqa: PLC0415 - optional  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("GSM8K from the hub is in parquet files: pip install pyarrow") from None
    return [row for file in files for row in cast("Any", pq).read_table(file).to_pylist()]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - optional

    check_on_hub(name, "dataset", "README.md")
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=["main/*"], etag_timeout=10))
    except OSError as error:  # errors of the hub are OSErrors too
        raise ConfigError(f"GSM8K at {name!r} cannot be downloaded: {error}") from error
