"""How a run in several processes (`pytest -n 3 --dist loadfile`) is spread: all that needs real engines in one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ENGINES = "engines"


class ByFile(LoadFileScheduling):
    """A file at a time, for the sake of its fixtures, and as one those that share real engines or start some.

    Engines are then started once, and never many at a time. Not by pytest-xdist's groups: with pytest 9.2 they are
    ignored (its issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope(self.config.rootpath, nodeid)


def scope(root: Path, nodeid: str) -> str:
    """What is run by one process: a file, or all that needs engines."""
    file, _, _ = nodeid.partition("::")
    return ENGINES if needs_engines(root / file) else file


@cache
def needs_engines(file: Path) -> bool:
    """By its text, since this is asked where no test is imported. A local Ray cluster is as large as an engine."""
    return file.name.startswith("test_ray_") or (file.is_file() and "pytest.mark.vllm" in file.read_text())
