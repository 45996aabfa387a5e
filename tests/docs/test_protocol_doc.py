"""docs/protocol.md names every header, route, error code and field that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock import wire
from penstock.fleet.service import CALLS
from penstock.fleet.skyrl_paths import SKYRL

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PAGE = (ROOT / "docs" / "protocol.md").read_text()
CODE_OF_REFUSAL = re.compile(r'\b[45]\d\d, "([a-z_]+)"')
ROUTE = re.compile(r'"(/(?:penstock|router)/[a-z_/]+[a-z])"')


def found(pattern: re.Pattern[str], folder: str) -> set[str]:
    """What the pattern catches in the sources of one folder."""
    return {name for file in (SOURCE / folder).rglob("*.py") for name in pattern.findall(file.read_text())}


def missing(names: set[str], page: str = PAGE) -> set[str]:
    """Names that the page does not have in backquotes, alone or within a call."""
    return {name for name in names if not re.search(rf"`[^`]*(?<!\w){re.escape(name)}\b[^`]*`", page)}


@pytest.mark.parametrize(
    "names",
    [
        {value for name, value in vars(wire).items() if name.endswith(("_HEADER", "_ARG")) and isinstance(value, str)},
        found(CODE_OF_REFUSAL, "router"),
        found(ROUTE, "."),
        {f"{prefix}{name}" for prefix, names in CALLS.values() for name in names},
        {f"/skyrl/v1/{name}" for name in SKYRL},
    ],
    ids=["headers", "error codes", "routes", "calls of the owner", "SkyRL's paths"],
)
def test_every_name_is_there(names: set[str]) -> None:
    assert names
    assert not missing(names)
