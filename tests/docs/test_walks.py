"""The walks of ARCHITECTURE.md are what runs: a fleet is launched, and each of its processes notes what it runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_house import SIDE_ROOMS
from walks_program import CUT, DEATH, REQUEST, UPDATE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
WALKS = (ROOT / "ARCHITECTURE.md").read_text().partition("## Walks")[2].partition("## States")[0]
TITLES = {REQUEST: "A request", UPDATE: "An update", DEATH: "A death"}

HELPERS = set(re.findall(r"`([\w/]+\.py)`", WALKS.partition("Helpers, without a step: ")[2].partition("\n")[0]))

NO_STEPS = {"fleet/pausing.py", "plugin/spec.py"}
"""The first holds a probe's answer against what the fleet is in, where a broken connection shows a death before the end
of the process does. The second is of an engine's start: it finds its model's tensors, sometimes only as it loads."""

ENGINES_SIDE = ("plugin/", "weights/")
"""What simulated engines, which have none of it, do not run, or run in other places."""

NOTE = """
import mmap, os, signal, sys, threading

marks = os.environ["WALKS"]
with open(marks, "r+b") as file:
    mark = mmap.mmap(file.fileno(), 1)
notes = os.open(marks + ".notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
seen = set()

def note(frame, event, _):
    if event != "call" or not mark[0]:
        return
    walk, code = mark[0], frame.f_code
    if (walk, code) in seen:
        return
    at = code.co_filename.rfind("/src/penstock/")
    if at >= 0:
        while frame is not None:
            if "importlib._bootstrap" in frame.f_code.co_filename:
                return  # it is imported, which is not yet run
            frame = frame.f_back
        os.write(notes, f"{walk} {code.co_filename[at + 14:]} {code.co_firstlineno}\\n".encode())
    seen.add((walk, code))

signal.signal(signal.SIGUSR2, lambda *_: sys.setprofile(note))
threading.setprofile(note)
if any(argument.endswith("walks_program.py") for argument in sys.orig_argv):
    sys.setprofile(note)
"""
"""`sitecustomize` of every process."""


def run(tmp_path: Path, profile: str, model: str) -> dict[int, dict[str, set[int]]]:
    """The files that ran during each walk, and the first lines of their functions."""
    (tmp_path / "sitecustomize.py").write_text(NOTE)
    marks = tmp_path / "marks"
    marks.write_bytes(b"\0")
    path = os.pathsep.join([str(tmp_path), str(SOURCE.parent)])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("walks_program.py")), profile, model, str(marks)],
        capture_output=True, text=True, timeout=560, check=False,
        env={**os.environ, "WALKS": str(marks), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[int, dict[str, set[int]]] = {walk: {} for walk in (REQUEST, UPDATE, DEATH, CUT)}
    for line in Path(f"{marks}.notes").read_text().splitlines():
        walk, file, first = line.split()
        if not file.startswith("sim/"):  # it stands in for vLLM
            found[int(walk)].setdefault(file, set()).add(int(first))
    return found


def lines(file: str) -> int:
    return len((SOURCE / file).read_text().splitlines())


def lines_that_run(file: str, firsts: set[int]) -> int:
    """Lines of the functions that begin at these lines, decorators counted."""
    found: set[int] = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if begin in firsts:
                found.update(range(begin, (node.end_lineno or begin) + 1))
    return len(found)


def named(walk: int) -> set[str]:
    """Files of a walk's steps; what is told behind them is of another way."""
    section = WALKS.partition(f"### {TITLES[walk]}: ")[2].partition("###")[0]
    steps = "\n".join(re.findall(r"^\d\. .*$", section, re.MULTILINE))
    return set(re.findall(r"`([\w/]+\.py)`", steps))


def said(walk: int) -> list[int]:
    """Files, their lines, and lines of the functions that run, by the walk's heading."""
    heading = re.search(rf"^### {TITLES[walk]}: ([\d,]+) files, ([\d,]+) lines, ([\d,]+) run$", WALKS, re.MULTILINE)
    assert heading
    return [int(figure.replace(",", "")) for figure in heading.groups()]


def check(found: dict[int, dict[str, set[int]]], *, plugin: bool) -> None:
    """Compare what ran with the page. Without the plugin, what a step names of it and of the engines' side counts."""
    measured: dict[str, list[int]] = {}
    for walk, title in TITLES.items():
        ran, steps = set(found[walk]) - NO_STEPS, named(walk)
        missing = steps - (ran if walk == UPDATE else ran | set(found[CUT]))
        wrong = missing if plugin else {file for file in missing if not file.startswith(ENGINES_SIDE)}
        assert wrong == set(), f"{title}: the page names them, and they do not run"
        if not plugin:
            ran -= {file for file in ran - steps if file.startswith(ENGINES_SIDE)}
        modules = {file: f"penstock.{file.removesuffix('.py').replace('/', '.')}" for file in ran}
        assert {file for file, module in modules.items() if module.startswith(SIDE_ROOMS)} == set(), title
        if walk == DEATH:  # an engine that is back loads as in an update, whose figures have it
            ran -= {file for file in found[UPDATE].keys() - steps if file.startswith(ENGINES_SIDE)}
        files = ran | {file for file in steps if file.startswith(ENGINES_SIDE)}
        assert files - steps - HELPERS == set(), f"{title}: they run, and the page does not name them"
        running = sum(lines_that_run(file, firsts) for file, firsts in found[walk].items() if file in ran)
        measured[title] = [len(files), sum(map(lines, files)), running]
    most = {title: said(walk) for walk, title in TITLES.items()}
    assert all(figure <= most[title][i] for title in most for i, figure in enumerate(measured[title])), measured


def test_the_walks_are_what_runs_on_simulated_engines(tmp_path: Path) -> None:
    check(run(tmp_path, "sim", "sim-model"), plugin=False)


@pytest.mark.slow
@pytest.mark.vllm
def test_the_walks_are_what_runs_on_real_engines(tmp_path: Path, nano_path: Path) -> None:
    check(run(tmp_path, "cpu", str(nano_path)), plugin=True)
