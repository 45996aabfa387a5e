"""A vllm-router as others start it, on loopback and without workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.engine.launch import reserved_port
from penstock.process import ChildProcess

installed = pytest.mark.skipif(
    find_spec("vllm_router") is None, reason="vllm-router is not installed (requirements/cpu.lock has it)"
)
START_S = 60.0


@asynccontextmanager
async def vllm_router(log: Path, policy: str = "consistent_hash") -> AsyncIterator[str]:
    """Its address, once it listens."""
    with reserved_port() as port, reserved_port() as metrics:
        options = {
            "host": "127.0.0.1",
            "port": port,
            "policy": policy,
            "prometheus-port": metrics,
            "log-level": "warning",
            "worker-startup-timeout-secs": 10,
            "worker-startup-check-interval": 1,
        }
        argv = [sys.executable, str(Path(__file__).with_name("under_lifeline.py"))]
        argv += [sys.executable, "-m", "vllm_router.launch_router"]
        argv += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        child = await ChildProcess.start(argv, name="vllm-router", log=log)
        try:
            async with asyncio.timeout(START_S):
                while True:
                    assert child.returncode is None, child.said()
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        break
                    except OSError:
                        await asyncio.sleep(0.05)
            writer.close()
            yield f"http://127.0.0.1:{port}"
        finally:
            await child.stop(5.0)
