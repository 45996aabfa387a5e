"""The folder of one run: its configuration, the record of each step, its results.

docs/reference/run-folder.md describes every file and every key of metrics.jsonl.

The training process holds the lock file `.NAME.lock` beside the folder (`RunFolder.lock`). Readers take no lock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, Self, cast

import yaml

from penstock.checks import parse_json, reading, whole_number
from penstock.config import RunConfig, load_config
from penstock.errors import ConfigError, UserError
from penstock.observe.summary import Summary
from penstock.observe.trace import Span, chrome_trace
from penstock.rollout.generator import Trajectory

CONFIG = "config.yaml"
HELD_OUT = "held_out_accuracy"
"""Name of the figure that an evaluation records."""
RECORDS = ("metrics.jsonl", "evaluations.jsonl", "trajectories.jsonl", "spans.jsonl")
"""Files with one row for each step, or for some steps."""
SHOWN = 8
"""Number of trajectories in trajectories.md, spread over the run."""
MAY_CHANGE = ("train.steps", "train.ranks", "train.ray_address", "run_dir", "trackers")
"""Keys that a resumed run may change: its length, its ranks, its folder, and its trackers."""

_locks: set[IO[bytes]] = set()
"""Lock files that this process holds. A forked child closes them, or it would hold them after the parent's death."""
os.register_at_fork(after_in_child=lambda: [held.close() for held in _locks])


class RunFolder:
    """A run's folder. Build it with `create` or `open`.

    Attributes:
        on_figures: callback for the figures and step number of each step and evaluation.
    """

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self.on_figures: Callable[[Mapping[str, float], int], None] = lambda _, __: None

    @staticmethod
    @contextmanager
    def lock(path: Path) -> Generator[None]:
        """Hold the run in `path` for this process alone, whether or not its folder exists.

        The kernel frees the lock when this process ends in any way. The lock file stays, even if the folder is removed.

        Raises:
            UserError: another process holds the run, or the lock file cannot be written.
        """
        folder = path.resolve()
        file = folder.with_name(f".{folder.name}.lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Only its owner may open the file: whoever can read it can lock it.
            held = open(file, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot write {file}, the lock of the run: {error}; choose another run_dir") from error
        with held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
                file.write_text(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")
            except BlockingIOError:
                holder = file.read_text(errors="replace").strip() or "another process"
                raise UserError(
                    f"the run in {path} is going on: it is held by {holder}; wait for its end, stop it, or choose "
                    "another name"
                ) from None
            except OSError as error:
                raise UserError(f"cannot lock {file}: {error}; choose a run_dir on another file system") from error
            _locks.add(held)
            try:
                yield
            finally:
                _locks.discard(held)

    @staticmethod
    def check_unused(path: Path) -> None:
        """Raise UserError if `path` holds a run with a recorded step. A run that failed to start does not count."""
        if _read(path / "metrics.jsonl"):
            raise UserError(
                f"{path} already holds a run; go on with it by --resume, replace it by --fresh, or choose another name"
            )

    @staticmethod
    def remove(path: Path) -> bool:
        """Delete the folder `path` if it holds a run, else leave it as it is. Return whether there was a run.

        Raises:
            UserError: the folder cannot be deleted.
        """
        if not all((path / name).is_file() for name in (CONFIG, RECORDS[0])):
            return False
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise UserError(f"cannot remove the run in {path}: {error}; choose another name") from error
        return True

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> Self:
        """Create the folder of a new run. Remove the files of an earlier run without a step.

        Raises:
            UserError: the folder already holds a run, or cannot be written.
        """
        cls.check_unused(path)
        folder = cls(path, config)
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in RECORDS:
                (path / name).unlink(missing_ok=True)
            folder.write_config(config)
        except OSError as error:
            raise UserError(f"cannot write the run folder {path}: {error}; choose another run_dir") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the folder of an existing run. UserError: it holds none."""
        file = path / CONFIG
        if not file.exists():
            raise UserError(f"{path} holds no run: {file.name} is missing")
        return cls(path, load_config(file))

    # --- configuration -----------------------------------------------------------------------------------------------

    def write_config(self, config: RunConfig) -> None:
        self.config = config
        _replace(self.path / CONFIG, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def check_resumable(self, config: RunConfig) -> None:
        """Refuse to resume with another configuration than the run's own.

        Raises:
            ConfigError: some keys differ that must not (see `MAY_CHANGE`). The message names each.
        """
        ours, theirs = _flat(self.config.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
        changed = [key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]
        refused = [key for key in changed if key not in MAY_CHANGE]
        if refused:
            listed = "; ".join(f"{key} was {ours.get(key)!r} and is now {theirs.get(key)!r}" for key in refused)
            raise ConfigError(
                f"cannot resume {self.path} with another configuration: {listed}; only {', '.join(MAY_CHANGE)} may "
                f"change, and {self.path / CONFIG} is the run's own"
            )

    # --- rows of each step -------------------------------------------------------------------------------------------

    def append_metrics(self, row: Mapping[str, float]) -> None:
        """Append the row of one step. The row survives any end of this process."""
        _append(self.path / "metrics.jsonl", [row])
        self.on_figures(row, int(row["step"]))

    def metrics(self) -> list[dict[str, float]]:
        return cast("list[dict[str, float]]", _read(self.path / "metrics.jsonl"))

    def append_evaluation(self, step: int, accuracy: float) -> None:
        _append(self.path / "evaluations.jsonl", [{"step": step, "accuracy": accuracy}])
        self.on_figures({HELD_OUT: accuracy}, step)

    def evaluations(self) -> dict[int, float]:
        """Return held-out accuracies in order, by the step after which they were measured."""
        return {row["step"]: row["accuracy"] for row in _read(self.path / "evaluations.jsonl")}

    def append_trajectories(self, records: Sequence[Mapping[str, Any]]) -> None:
        _append(self.path / "trajectories.jsonl", records)

    def trajectories(self) -> list[dict[str, Any]]:
        """Return the rows that `record_of` made."""
        return _read(self.path / "trajectories.jsonl")

    def append_spans(self, spans: Sequence[Span]) -> None:
        _append(self.path / "spans.jsonl", spans)

    def spans(self) -> list[Span]:
        return list(_read(self.path / "spans.jsonl"))

    def write_trace(self) -> Path:
        file = self.path / "trace.json"
        _replace(file, chrome_trace(self.spans(), self.config.name))
        return file

    def truncate(self, step: int) -> list[dict[str, float]]:
        """Drop the rows after `step`, so that a resumed run records no step twice. Return the dropped metrics."""
        dropped = [row for row in self.metrics() if row["step"] > step]
        for name in RECORDS:
            file = self.path / name
            if file.exists():
                _replace(file, _lines(row for row in _read(file) if row["step"] <= step))
        return dropped

    # --- end of the run ----------------------------------------------------------------------------------------------

    def write_summary(self, summary: Summary) -> None:
        """Write trajectories.md and trace.json from the records, and last summary.json: the run has ended."""
        _replace(self.path / "trajectories.md", to_markdown(self.trajectories()))
        self.write_trace()
        _replace(self.path / "summary.json", json.dumps(summary.to_json(), indent=2) + "\n")

    def has_ended(self, config: RunConfig) -> bool:
        """Return whether the run has made its last step and written its summary. ConfigError: see `check_resumable`."""
        self.check_resumable(config)
        rows = self.metrics()
        written = (self.path / "summary.json").exists()
        return bool(rows) and written and self.summary()["steps"] == rows[-1]["step"] == config.train.steps

    def summary(self) -> dict[str, Any]:
        """Read summary.json. UserError: the run has not ended."""
        try:
            text = (self.path / "summary.json").read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self.path} has no summary.json: the run has not ended; resume it first") from None
        return parse_json(text, f"{self.path}/summary.json", loads=json.loads)

    @contextmanager
    def capture_log(self) -> Generator[None]:
        """Append Penstock's log messages at INFO and above to run.log."""
        logger = logging.getLogger("penstock")
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        level = logger.level
        logger.setLevel(min(level or logging.INFO, logging.INFO))
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            handler.close()


# --- sample trajectories, for people ---------------------------------------------------------------------------------


def record_of(step: int, trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return a trajectory of step `step` as a row of trajectories.jsonl.

    `loss` of a token is 1 if the policy made the token and 0 if the environment did. `episode` is the session of an
    agent's episode; the episode's log is named after it. `decode` keeps special tokens.
    """
    columns = zip(trajectory.response_ids, trajectory.logprobs, trajectory.versions, trajectory.loss_mask, strict=True)
    return {
        "step": step,
        "group": trajectory.group_id,
        "prompt": decode(trajectory.prompt_ids),
        "response": decode(trajectory.response_ids),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "tokens": [
            {"id": i, "text": decode([i]), "logprob": logprob, "version": version, "loss": loss}
            for i, logprob, version, loss in columns
        ],
        "episode": trajectory.episode_id,
    }


def pick(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories to record: the first, and the next of two versions."""
    first = trajectories[:1]
    mixed = [t for t in trajectories[1:] if len(set(t.versions)) > 1][:1]
    return [*first, *mixed]


def to_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Return at most `SHOWN` records as Markdown. They spread over the run, with the first and the last."""
    last, shown = len(records) - 1, min(SHOWN, len(records))
    chosen = [records[i * last // max(shown - 1, 1)] for i in range(shown)]
    return "# Sample trajectories\n\n" + "\n".join(_section(record) for record in chosen)


def _section(record: Mapping[str, Any]) -> str:
    versions = sorted({token["version"] for token in record["tokens"]})
    rows = "\n".join(
        f"| {i} | {token['id']} | {_code(token['text'])} | {token['logprob']:.4f} | {token['version']} |"
        for i, token in enumerate(record["tokens"])
    )
    return (
        f"## Step {record['step']}, group {record['group']}, reward {record['reward']:g}\n\n"
        f"Ended by {record['stop_reason']}; made by weight version {', '.join(map(str, versions)) or 'none'}.\n\n"
        f"Prompt: {_code(record['prompt'])}\n\n"
        f"Response: {_code(record['response'])}\n\n"
        f"| # | id | token | logprob | version |\n|---|---|---|---|---|\n{rows}\n"
    )


def _code(text: str) -> str:
    """Return text as one line of code for a table cell. White space shows, and no backtick or bar ends the cell."""
    escaped = json.dumps(text, ensure_ascii=False).replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", escaped)), default=0))
    return f"{fence}{escaped}{fence}"


# --- files -----------------------------------------------------------------------------------------------------------


def _append(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("a") as out:
        out.write(_lines(rows))


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file. Ignore an unfinished last line, which a kill during a write leaves."""
    text = file.read_text() if file.exists() else ""
    whole, _, _ = text.rpartition("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(whole.splitlines(), start=1):
        row = parse_json(line, f"{file}, line {number}", _damaged, loads=json.loads)
        with reading(f"row in {file}, line {number}", _damaged):
            whole_number(row["step"], "its step", error=_damaged)
        rows.append(row)
    return rows


def _damaged(why: str) -> UserError:
    return UserError(f"{why}; take the line out or restore the file")


def _replace(file: Path, text: str) -> None:
    """Write the whole file or nothing."""
    fresh = file.with_name(file.name + ".new")
    with fresh.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    fresh.replace(file)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(cast("Mapping[str, Any]", value), f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
