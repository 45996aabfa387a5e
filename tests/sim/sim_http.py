"""What tests of the simulated engine share: virtual time, a client session, the parsing of event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from patience import WAIT_S
from penstock.sim import SimConfig, SimServer

PROMPT = [5, 6, 7]


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


class Client:
    """JSON calls to one server, each with a deadline."""

    def __init__(self, server: SimServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def call(self, method: str, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.session.request(method, self.server.url + path, json=body, **kwargs) as answer:
            raw = await answer.read()
            return answer.status, orjson.loads(raw) if answer.content_type == "application/json" else raw

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> Any:
        """Answer of a call that must succeed."""
        status, answer = await self.call("POST", path, body, **kwargs)
        assert status == 200, answer
        return answer

    async def get(self, path: str) -> Any:
        """Answer of a call that must succeed."""
        status, answer = await self.call("GET", path)
        assert status == 200, answer
        return answer

    async def generate(self, max_tokens: int, **sampling: Any) -> Any:
        """One token request with logprobs."""
        params = {"max_tokens": max_tokens, "logprobs": 0, **sampling}
        return await self.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})

    async def events(self, path: str, body: Any) -> list[Any]:
        """Events of a stream that ends as it should; `[DONE]` is the last."""
        async with self.session.post(self.server.url + path, json=body) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            return parse_events(await answer.read())


def parse_events(raw: bytes) -> list[Any]:
    """The data of each event."""
    data = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line and not line.startswith(b":")]
    return [item.decode() if item == b"[DONE]" else orjson.loads(item) for item in data]


@asynccontextmanager
async def sim_client(config: SimConfig | None = None) -> AsyncIterator[Client]:
    """A server and a client of it."""
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with SimServer(config) as server, aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(server, session)
