"""`penstock serve` with a real engine, as its users see it: the openai client, curl, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import openai
import psutil
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


async def test_serve_answers_openai_clients_and_leaves_nothing(nano_path, tmp_path):
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "serve", str(nano_path), "--engines", "1", "--cpu", "max_model_len=512",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, "TMPDIR": str(tmp_path)},
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
        assert (await _curl(f"{url}/v1/models"))["object"] == "list"
        body = json.dumps({"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True})
        given = await _curl(f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body)
        assert len(given["choices"][0]["token_ids"]) == 2
    finally:
        server.send_signal(signal.SIGINT)
        await asyncio.wait_for(server.wait(), 30)
    assert server.returncode == 0
    assert [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


async def _ready_url(out: asyncio.StreamReader) -> str:
    seen = ""
    while line := (await out.readline()).decode():
        seen += line
        for word in line.split():
            if word.startswith("http://"):
                return word.rstrip("/").removesuffix("/v1")
    raise AssertionError(f"no ready line in: {seen}")


async def _curl(*arguments: str):
    curl = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "60", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await curl.communicate()
    return json.loads(out)
