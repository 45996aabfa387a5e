from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def served_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`penstock serve` with the model name of the docs, on simulated engines; what port 8000 stands for in them."""
    argv = [BIN / "penstock", "serve", "Qwen/Qwen3-0.6B", "--engines", "2", "--sim", "--port", "0"]
    log = tmp_path_factory.mktemp("serve") / "stderr.log"
    env = {name: value for name, value in os.environ.items() if name != "PENSTOCK_API_KEY"}
    with (
        log.open("w") as errors,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as server,
    ):
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready:"), log.read_text()
        yield ready.split()[-1].removesuffix("/v1")
        server.terminate()
