"""What `make` does, with programs of its own in the place of those it runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from patience import WAIT_S

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def test_bench_runs_every_benchmark_and_fails_where_one_did(tmp_path: Path) -> None:
    shutil.copy(MAKEFILE, tmp_path)
    # `.ready` last: nothing it is made of is newer.
    for name in ("requirements/cpu.lock", "pyproject.toml", "scripts/setup.sh", ".venv/bin/python", ".venv/.ready"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\necho "$1" >> ran\n[ "$1" != benchmarks/b.py ]\n')
    python.chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    for name in ("_common.py", "a.py", "b.py", "c.py"):
        (tmp_path / "benchmarks" / name).touch()
    assert _make(tmp_path) != 0
    assert (tmp_path / "ran").read_text().split() == ["benchmarks/a.py", "benchmarks/b.py", "benchmarks/c.py"]
    (tmp_path / "benchmarks" / "b.py").unlink()
    assert _make(tmp_path) == 0


def _make(folder: Path) -> int:
    return subprocess.run(["make", "bench"], cwd=folder, capture_output=True, timeout=WAIT_S, check=False).returncode
