from __future__ import annotations

from pathlib import Path

import pytest

from nano_models import History


@pytest.fixture(scope="module")
def history(nano_path: Path) -> History:
    """Of the engines of a module, which load the nano checkpoint."""
    return History.of(nano_path)
