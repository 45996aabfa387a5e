"""`penstock serve` with a real engine, as its users see it: the openai client, and nothing left when killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


MARK = "PENSTOCK_TEST"
"""A variable that all processes of one test inherit."""


async def test_serve_answers_openai_clients_and_when_killed_leaves_nothing(nano_path, tmp_path):
    """Invariant 5 on a real engine: no process, no shared memory and no socket."""
    before, mark = _named(tmp_path), uuid.uuid4().hex
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "serve", str(nano_path), "--engines", "1", "--cpu", "max_model_len=512",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
    )  # fmt: skip
    children: list[psutil.Process] = []
    try:
        url = await asyncio.wait_for(_ready_url(server.stdout), 150)
        children = psutil.Process(server.pid).children(recursive=True)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        (model,) = (await client.models.list()).data
        answer = await client.completions.create(model=model.id, prompt="1 2", max_tokens=5)
        assert answer.usage.completion_tokens == 5
        messages = [{"role": "user", "content": "3 1 2"}]
        stream = await client.chat.completions.create(model=model.id, messages=messages, max_tokens=6, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text
        with pytest.raises(openai.BadRequestError, match="512"):
            await client.completions.create(model=model.id, prompt=[5] * 600, max_tokens=5)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nobody", prompt="1", max_tokens=1)
        await client.close()
        assert len(children) >= 3, "expected the router, the API server and the engine core"
    finally:
        server.kill()
        await server.wait()
    # They end with their launcher by an event, far within 5 s; but a machine that stands still counts for them too.
    deadline = time.monotonic() + 60
    while [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, "engine processes outlived their launcher by a minute"
        await asyncio.sleep(0.05)
    while left := _named(tmp_path) - before - _of_others(mark):  # Python's resource tracker cleans up after the dead
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


async def _ready_url(out: asyncio.StreamReader) -> str:
    seen = ""
    while line := (await out.readline()).decode():
        seen += line
        for word in line.split():
            if word.startswith("http://"):
                return word.rstrip("/").removesuffix("/v1")
    raise AssertionError(f"no ready line in: {seen}")


def _named(folder: Path) -> set[Path]:
    """Shared memory, and what lies directly in a folder for temporary files as the sockets of vLLM's processes do."""
    return {*Path("/dev/shm").iterdir(), *folder.glob("????????-????-*"), *folder.glob("penstock-e-*")}  # noqa: S108


def _of_others(mark: str) -> set[Path]:
    """Shared memory that living processes without our mark have mapped: other tests run at the same time."""
    found: set[Path] = set()
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(MARK) != mark:
            with suppress(psutil.Error):
                found |= {Path(mapped.path) for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}  # noqa: S108
    return found
