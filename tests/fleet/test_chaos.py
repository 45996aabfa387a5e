"""Seeded faults under load (`chaos_run.py`): what no client may lose, it does not lose.

Held: `Fleet.generate` loses nothing; a plain request, or a stream before its first event, loses nothing by the death of
an engine, and has all the tokens that it asked for; each engine and router that was struck serves again. Only counted,
in `failed` of the run's document: plain requests and streams that meet the death of a router process, and streams that
break off after their first event.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


async def _chaos(*arguments: str, timeout_s: float) -> dict[str, Any]:
    run = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "chaos_run.py"), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, log = await asyncio.wait_for(run.communicate(), timeout_s)
    assert out, log.decode()[-4000:]
    seen = json.loads(out)
    assert run.returncode == 0, f"{json.dumps(seen, indent=1)}\n{log.decode()[-2000:]}"
    return seen


@pytest.mark.timeout(600)
async def test_a_death_of_any_process_costs_no_request():
    """Simulated engines, one of each fault."""
    seen = await _chaos(
        "sim-model", "--profile", "sim", "--faults", "6", "--only", "router,api",
        "--engine", '{"hang_timeout_s": 3.0}', timeout_s=540,
    )  # fmt: skip
    assert sum(seen["faults"].values()) == 6
    assert min(seen["asked"].values()) > 20


@pytest.mark.slow
@pytest.mark.timeout(1300)
async def test_hundreds_in_flight_meet_updates_and_deaths_and_memory_stays_flat():
    seen = await _chaos(
        "sim-model", "--profile", "sim", "--faults", "20", "--only", "api", "--clients", "60", "--engines", "3",
        "--update-every", "5", "--tokens-per-second", "40", timeout_s=1200,
    )  # fmt: skip
    assert sum(seen["faults"].values()) == 20
    assert seen["updates"] >= 20
    assert max(seen["memory_mib"][-5:]) < 1.10 * max(seen["memory_mib"][:5])


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(9100)
@pytest.mark.parametrize(("faults", "victims", "within_s"), [(12, "api,core", 900), (100, "router,api,core", 8700)])
async def test_faults_cost_no_request_on_real_engines(nano_path, faults: int, victims: str, within_s: int):
    options = ["--faults", str(faults), "--only", victims, "--seconds", str(within_s)]
    seen = await _chaos(str(nano_path), *options, timeout_s=within_s + 300)
    assert sum(seen["faults"].values()) == faults
