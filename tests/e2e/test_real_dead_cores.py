"""Two real vLLM engines, core and server of them killed in turn under load: nothing fails before its first byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter

import aiohttp
import httpx
import openai
import pytest
from test_real_deaths import core_of, returned

from penstock import Fleet
from penstock.router.admin_client import RouterAdmin

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("PENSTOCK_TEST_KILLS", "10"))
CLIENTS = 4
BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}
LOAD_S = 1.5
"""Load before each kill, and after it while the dead engine's server may still answer."""


class Load:
    """Plain requests and OpenAI streams without an end; how each of them ended."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.ended: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stopped = False

    async def plain(self) -> None:
        async with aiohttp.ClientSession(self._url) as session:
            while not self._stopped:
                async with session.post("/v1/completions", json={"model": self._model, **BODY}) as answer:
                    content = await answer.read()
                self._end("plain", answer.status == 200 and b'"choices"' in content, content.decode()[:300])

    async def streams(self) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            while not self._stopped:
                await self._stream(client)

    async def _stream(self, client: openai.AsyncOpenAI) -> None:
        begun = False
        given = {"model": self._model, "prompt": BODY["prompt"], "max_tokens": BODY["max_tokens"]}
        try:
            stream = await client.completions.create(**given, stream=True, extra_body={"ignore_eos": True})
            async for _ in stream:
                begun = True
        except (openai.APIError, httpx.HTTPError) as error:
            self._end("begun stream" if begun else "stream", begun, repr(error))
            return
        self._end("stream", begun, "no event")

    def _end(self, what: str, well: bool, why: str) -> None:  # noqa: FBT001
        self.ended[what if well else f"{what} failed"] += 1
        if not well:
            self.failures.append(f"{what}: {why}")

    async def run(self) -> None:
        await asyncio.gather(*[self.plain() for _ in range(CLIENTS)], *[self.streams() for _ in range(CLIENTS)])

    def stop(self) -> None:
        self._stopped = True


async def test_cores_and_servers_killed_in_turn_under_load(nano_path, tmp_path):
    given = json.loads(os.environ.get("PENSTOCK_TEST_ENGINE", '{"profile": "cpu"}'))
    options = {"restart_backoff_s": 0.1, "log_dir": tmp_path / "logs", **given}
    async with Fleet.launch(nano_path, engines=2, dtype="float32", max_model_len=512, **options) as fleet:
        load = Load(fleet.url, str(nano_path))
        running = asyncio.create_task(load.run())
        for number in range(KILLS):
            member = fleet._roster.members[number % 2]
            before = len(member.lifecycle.history)
            await asyncio.sleep(LOAD_S)
            if number % 4 < 2:
                os.kill(core_of(member.process.pid), signal.SIGKILL)
            else:
                os.killpg(member.process.pid, signal.SIGKILL)
            await asyncio.sleep(LOAD_S)
            await returned(fleet, number % 2, before)
            print(f"kill {number}: {dict(load.ended)}", flush=True)
            assert not load.failures, (number, load.failures, load.ended)
        load.stop()
        await asyncio.wait_for(running, 120)
        admin = RouterAdmin(fleet.url)
        retries = [line for line in (await admin.metrics()).splitlines() if "retries_total{" in line]
        await admin.close()
    print(f"{KILLS} kills: {dict(load.ended)}; {retries}")
    assert any('"dead"' in line for line in retries), "no answer of a dead core was held back"
    assert not load.failures
    assert load.ended["plain"] > 10 * KILLS
    assert load.ended["stream"] > 10 * KILLS
