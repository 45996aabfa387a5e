"""Tokens lost by mode, on a real CPU engine: that the benchmark runs, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "weight_sync.py"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_mode_has_its_tokens_lost(tmp_path: Path) -> None:
    modes = "recompute,keep_in_flight,keep"
    options = ["--profile", "cpu", "--kv", modes, "--rounds", "1", "--load", "8", "--logs", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, timeout=580, check=False
    )
    document = json.loads(done.stdout)
    assert set(document["seconds"]) == set(modes.split(","))
    for mode, sides in document["seconds"].items():
        figures = sides["penstock"]
        assert figures["steady_tokens_per_s"][0] > 0
        assert figures["tokens_lost"][0] >= 0
        assert (figures["kept"][0] > 0) == (mode != "recompute")
