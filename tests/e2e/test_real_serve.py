"""`penstock serve` with a real engine, as its users see it: the openai client, and nothing left when killed."""

from __future__ import annotations

import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest

from run_cli import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


MARK = "PENSTOCK_TEST"
"""A variable that all processes of one test inherit."""


def test_serve_answers_openai_clients_and_when_killed_leaves_nothing(nano_path, tmp_path):
    """Invariant 5 on a real engine: no process, no shared memory and no socket."""
    before, mark = _named(tmp_path), uuid.uuid4().hex
    args = ("serve", str(nano_path), "--engines", "1", "--cpu", "--port", "0", "max_model_len=512")
    with serving(tmp_path / "log", *args, **{"TMPDIR": str(tmp_path), MARK: mark}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        (model,) = client.models.list().data
        answer = client.completions.create(model=model.id, prompt="1 2", max_tokens=5)
        assert answer.usage.completion_tokens == 5
        messages = [{"role": "user", "content": "3 1 2"}]
        stream = client.chat.completions.create(model=model.id, messages=messages, max_tokens=6, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices])
        with pytest.raises(openai.BadRequestError, match="512"):
            client.completions.create(model=model.id, prompt=[5] * 600, max_tokens=5)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="1", max_tokens=1)
        client.close()
        assert len(server.family) >= 4, "expected the command, the router, the API server and the engine core"
        # They end with their launcher by an event, far within 5 s; but a machine that stands still counts for them too.
        assert server.signal(signal.SIGKILL) == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while left := _named(tmp_path) - before - _of_others(mark):  # Python's resource tracker cleans up after the dead
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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
