"""A vLLM server as others start it: by vLLM's own module, with options of one's own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.engine.launch import reserved_port
from penstock.errors import PenstockError
from penstock.http import HttpTransport
from penstock.process import ChildProcess


@asynccontextmanager
async def plain_server(
    options: Mapping[str, object], flags: Sequence[str], env: Mapping[str, str], log: Path
) -> AsyncIterator[str]:
    """Its address on loopback, once it answers; `options` have a value, `flags` none."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        given = {**options, "host": "127.0.0.1", "port": port}
        command += [part for name, value in given.items() for part in (f"--{name}", str(value))]
        argv = [sys.executable, str(Path(__file__).with_name("under_lifeline.py")), *command]
        child = await ChildProcess.start(argv, name="plain", log=log, env=env)
        http = HttpTransport(f"http://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(200):
                while True:
                    assert child.returncode is None, child.said()
                    try:
                        await http.call("GET", "/health", None, timeout_s=5.0)
                        break
                    except PenstockError:
                        await asyncio.sleep(0.5)
            yield http.url
        finally:
            await http.close()
            await child.stop(20.0)
