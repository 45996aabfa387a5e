"""Load, updates and deaths at once, on processes: nothing failed, lost, doubled or mislabelled, and memory is flat."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("load_run.py")
GROWTH = 0.10
"""Of memory, from the end of the first fifth on."""


async def run(*, seconds: float, timeout_s: float, **options: float) -> dict[str, Any]:
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in {"seconds": seconds, **options}.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, said = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out, said.decode()[-4000:]
    document = json.loads(out)
    print(out.decode())
    assert (document["failed"], document["wrong"]) == ([], [])
    assert process.returncode == 0
    assert document["requests"]["asked"] == document["requests"]["answered"]
    assert document["states"] == {"serving": 4}
    return document


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_thousand_in_flight_for_five_minutes() -> None:
    done = await run(seconds=300, concurrent=2000, timeout_s=540)
    assert done["updates"]["count"] >= 50
    assert done["deaths"]["count"] >= 14
    assert done["counters"]["deaths"] > 1000
    assert done["memory"]["client_growth"] < GROWTH
    assert done["memory"]["router_growth"] < GROWTH
