"""The real SDK against the API, over a small learner and simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from tinker_rig import KEY, rig

pytestmark = pytest.mark.usefixtures("shared_fleet")

PROGRAM = Path(__file__).with_name("sdk_program.py")


async def test_the_sdk_trains_saves_and_samples(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        environment = {**os.environ, "TINKER_BASE_URL": service.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), env=environment, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(child.communicate(), 400.0)
        assert child.returncode == 0
        found = json.loads(out.splitlines()[-1])
        assert found["loss"] == 3.5
        assert found["lengths"] == [8, 8]
        assert found["finished"]
