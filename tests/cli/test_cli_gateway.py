"""`penstock gateway` as a process, in front of a simulated engine."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from chat_model import save_chat_tokenizer
from penstock.cli import gateway
from penstock.engine.client import DataClient
from penstock.errors import ConfigError, UserError
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from run_cli import PENSTOCK, environment

DEADLINE_S = 300.0


async def test_it_serves_tenants_of_a_file_and_ends_by_a_signal(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path / "model")
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("team: {key: secret, max_turns: 1}\n")
    tenants.chmod(0o600)
    async with SimServer(SimConfig(vocab_size=98, eos_token_id=2)) as engine, asyncio.timeout(DEADLINE_S):
        process = await asyncio.create_subprocess_exec(
            PENSTOCK, "gateway", f"{engine.url}/v1", "--tokenizer", tmp_path / "model",
            "--port", "0", "--tenants", tenants,
            stdout=asyncio.subprocess.PIPE, env=environment(),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            ready = (await process.stdout.readline()).decode()
            match = re.fullmatch(r"ready: gateway to sim-model at (http://127.0.0.1:\d+), policy extend\n", ready)
            assert match, ready
            async with aiohttp.ClientSession(match[1], headers={"Authorization": "Bearer secret"}) as http:
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
                async with http.post("/v1/chat/completions", json=body) as answer:
                    assert (await answer.json())["usage"]["completion_tokens"] == 5
                async with http.post("/v1/chat/completions", json=body) as answer:
                    assert (await answer.json())["error"]["code"] == "budget_exceeded"
                async with http.get("/sessions/default/rows") as answer:
                    assert len((await answer.text()).splitlines()) == 1
        finally:
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0


def test_a_tenant_without_fields_is_named(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.touch(mode=0o600)
    tenants.write_text("team: secret\n")
    with pytest.raises(ConfigError, match=r"needs fields, such as `team: {key: KEY}`"):
        gateway._tenants(tenants)


async def test_a_router_key_that_is_missing_is_asked_for_by_its_names() -> None:
    async with SimServer(SimConfig(api_key="secret")) as engine:
        client = DataClient(engine.url)
        with pytest.raises(UserError, match="set PENSTOCK_API_KEY to it, or give --router-key"):
            await gateway._model(client)
        await client.close()
