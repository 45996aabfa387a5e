"""A whole harness that needs no further package: it plays an episode as `make test-harnesses` plays the others."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def test_anthropic_s_tool_runner_leaves_one_exact_row(tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "scripts"))
    import test_harnesses as harnesses

    command = [sys.executable, str(ROOT / "examples" / "agents" / "with_anthropic_sdk.py")]
    assert await harnesses.play(harnesses.HARNESSES["anthropic_sdk"], command, tmp_path) == []
