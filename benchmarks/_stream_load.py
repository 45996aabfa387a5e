"""Requests in flight at one engine, each a stream of single tokens, as agents' clients have: a process of its own.

python benchmarks/_stream_load.py URL MODEL REQUESTS SHORTEST LONGEST SEED

Reads lines on stdin: `mark` forgets the gaps seen so far, `end` ends it. `gaps` and `mark` answer with a line of JSON,
`{"streams", "tokens", "median_gap_s", "max_gap_s"}`: how many have begun, the tokens of all since the start, and the
longest time that each was without one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

import aiohttp
from _engine_key import bearer

TOKENS = (800, 2400)
VOCAB_USED = 1000


class Load:
    """Keeps so many streams open; a stream that ends is replaced."""

    def __init__(self, url: str, model: str, shortest: int, longest: int, seed: int) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._lengths = (shortest, longest)
        self._random = random.Random(seed)
        self.tokens = 0
        self.begun: set[int] = set()
        """Streams that have had a token: one that ended, and whose next request waits for its first, has begun too."""
        self.last: dict[int, float] = {}
        self.gap: dict[int, float] = {}

    def mark(self) -> None:
        """Count gaps from now on."""
        self.gap.clear()

    async def stream(self, session: aiohttp.ClientSession, number: int) -> None:
        """One request after the other."""
        while True:
            shortest, longest = self._lengths
            length = round(shortest * (longest / shortest) ** self._random.random())
            prompt = [2 + self._random.randrange(VOCAB_USED) for _ in range(length)]
            body = {
                "model": self._model, "prompt": prompt, "max_tokens": self._random.randint(*TOKENS), "ignore_eos": True,
                "stream": True, "temperature": 1.0, "logprobs": 0, "return_token_ids": True,
            }  # fmt: skip
            async with session.post(self._url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        before = self.last.get(number)
                        if before is not None:
                            self.gap[number] = max(self.gap.get(number, 0.0), now - before)
                        self.last[number] = now
                        self.begun.add(number)
                        self.tokens += 1
            self.last.pop(number, None)

    def report(self) -> str:
        """What was asked with `gaps`; a stream that is still waiting counts with the time it has waited."""
        now = time.perf_counter()
        gaps = [max(self.gap.get(number, 0.0), now - last) for number, last in self.last.items()] or [0.0]
        figures = {"streams": len(self.begun), "tokens": self.tokens}
        return json.dumps({**figures, "median_gap_s": statistics.median(gaps), "max_gap_s": max(gaps)})


async def main() -> None:
    """Run until `end` or the end of stdin."""
    url, model, requests, shortest, longest, seed = sys.argv[1:]
    load = Load(url, model, int(shortest), int(longest), int(seed))
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with aiohttp.ClientSession(
        headers=bearer(), timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20
    ) as session:
        streams = [asyncio.create_task(load.stream(session, number)) for number in range(int(requests))]
        while (command := (await reader.readline()).decode().strip()) not in {"", "end"}:
            failed = next((stream for stream in streams if stream.done()), None)
            if failed is not None:
                failed.result()
            if command == "mark":
                load.mark()
            print(load.report(), flush=True)
        for stream in streams:
            stream.cancel()


if __name__ == "__main__":
    asyncio.run(main())
