"""`make test` runs in several processes, of which one has all that needs real engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

spread = pytest.importorskip("spread", reason="needs pytest-xdist", exc_type=ImportError)

ROOT = Path(__file__).parent.parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
SHARED = re.compile(r"def \w+\(live\b")
"""How tests ask for the engine of conftest.py."""


def test_what_shares_an_engine_is_run_by_one_process() -> None:
    sharing = {file for file in FILES if SHARED.search((ROOT / file).read_text())}
    assert len(sharing) > 3
    assert {spread.scope(ROOT, f"{file}::test_any[a::b]") for file in sharing} == {spread.ENGINES}


def test_other_files_are_run_each_as_a_whole() -> None:
    file = "tests/fleet/test_lifecycle.py"
    assert {spread.scope(ROOT, f"{file}::{name}") for name in ("test_a", "TestB::test_c", "test_d[a::b]")} == {file}
