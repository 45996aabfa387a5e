"""`penstock serve --router vllm-router`: engines of ours behind a vllm-router that runs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI
from run_cli import penstock, serving

from vllm_router_server import installed, vllm_router


@installed
async def test_serve_behind_vllm_router_and_leave_nothing(tmp_path: Path) -> None:
    async with vllm_router(tmp_path / "router") as url:
        serve_behind(url, tmp_path / "log")


def serve_behind(url: str, log: Path) -> None:
    args = ("serve", "some-model", "--sim", "--engines", "2", "--router", "vllm-router")
    with serving(log, *args, f"router.url={url}", PENSTOCK_API_KEY="secret") as server:
        assert server.url == url
        client = OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        chat = client.chat.completions.create(
            model="some-model", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        streamed = client.completions.create(model="some-model", prompt="Hello", max_tokens=5, stream=True)
        assert len("".join(chunk.choices[0].text for chunk in streamed if chunk.choices)) == 5
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="wrong").completions.create(model="some-model", prompt="Hello")
        asked = penstock("status", server.url, PENSTOCK_API_KEY="secret")
        assert [line.split()[:4] for line in asked.stdout.splitlines()[2:]] == [
            ["e0", "serving", "0", "-"], ["e1", "serving", "0", "-"],
        ], "as the owner knows them"  # fmt: skip
        assert len(server.family) == 3, "serve and two engines"
        assert server.signal(signal.SIGINT) == 0
        assert server.process.stdout is not None
        usage = server.process.stdout.read()
        assert f"penstock status {server.url}" in usage
