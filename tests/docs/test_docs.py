"""Every code block in README.md and docs/ is run, or is on the list of those that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from sybil import Example
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from penstock.config import RunConfig
from penstock.options import validate
from penstock.rollout.environment import load_environment

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CANNOT_RUN = {
    "make ": "sets a machine up, or runs what this test is a part of",
    ".ci/run": "runs what this test is a part of",
    ".venv/bin/pre-commit install": "changes the checkout",
    "pip install": "changes the machine",
    "source .venv/bin/activate": "changes the shell",
    "nohup penstock serve": "outlives this test; tests/cli/test_cli_fleet.py runs it",
    "penstock serve": "serves until Ctrl-C; the fixture `served_url` runs it, tests/cli the rest",
    "penstock fleet": "changes a fleet that somebody serves; tests/cli/test_cli_fleet.py runs each",
    "penstock train": "takes minutes and real engines; tests of the demo run it",
    "PENSTOCK_GATEWAY_KEY=secret penstock gateway": "serves until Ctrl-C; tests/cli/test_cli_gateway.py runs it",
    "penstock tinker": "serves until Ctrl-C; tests/tinker runs it",
    "torchrun ": "waits for another node; tests/train/test_torchrun.py runs it on one",
    "penstock plot runs/demo": "needs the demo's run folder; tests/cli plots one",
}
"""Beginnings of command lines that are not run here, with the reason; their options are checked all the same."""


def blocks(document: Path, tmp_path: Path, *, port_8000: str = "127.0.0.1:8000") -> list[Example]:
    """The examples of a document in order, with another address in place of 127.0.0.1:8000."""
    copy = tmp_path / document.name
    copy.write_text(document.read_text().replace("127.0.0.1:8000", port_8000))
    parsers = (
        PythonCodeBlockParser(),
        CodeBlockParser("bash", lambda example: bash(example.parsed, tmp_path)),
        CodeBlockParser("yaml", lambda example: check_yaml(example.parsed)),
    )
    return list(Document.parse(str(copy), *parsers).examples())


def bash(script: str, folder: Path) -> None:
    lines = [line for line in script.splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        check_command(line)
    if all(line.startswith(tuple(CANNOT_RUN)) for line in lines):
        return
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    argv = ["bash", "-eu", "-c", script]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"


def check_command(line: str) -> None:
    """Every make target and every option of a penstock command exists."""
    if match := re.match(r"make (\S+)", line):
        assert re.search(rf"^{match[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    if match := re.match(r"penstock (\w+)", line):
        text = command_help(match[1])
        for option in re.findall(r"(?<=\s)--?[a-z-]+", line):
            assert option in text, f"{line!r}: penstock {match[1]} has no {option}"


@cache
def command_help(command: str) -> str:
    argv = [BIN / "penstock", command, "--help"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, f"penstock {command} does not exist: {done.stderr}"
    return done.stdout


def check_yaml(text: str) -> None:
    config = validate(RunConfig, {"engine": {"model": "any-name"}, **yaml.safe_load(text)})
    environment = load_environment(config.environment, seed=0)
    assert environment.train_task(0).prompt
    assert len(environment.heldout_tasks(config.eval.size)) == config.eval.size


@pytest.fixture
def modules_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a document tells its reader to save: a python block whose first line is a comment with the name."""
    for document in DOCUMENTS:
        for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", document.read_text(), re.DOTALL):
            (tmp_path / name).write_text(text)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.usefixtures("modules_of_the_docs")
def test_code_blocks_run(document: Path, tmp_path: Path, served_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for example in blocks(document, tmp_path, port_8000=served_url.removeprefix("http://")):
        example.evaluate()


def test_every_language_is_known() -> None:
    for document in DOCUMENTS:
        languages = set(re.findall(r"^```(\w+)", document.read_text(), re.MULTILINE))
        assert languages <= {"python", "bash", "yaml", "json", "text"}, document.name
