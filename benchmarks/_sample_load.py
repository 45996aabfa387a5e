"""A closed loop of requests, as a trainer's process makes them: a process of its own, told what to do line by line.

python benchmarks/_sample_load.py

A line of JSON on stdin is a round, `{"urls", "concurrent", "requests", "tokens", "seed"}`: requests go to the addresses
in turn, and ask for so many tokens, `[least, most]`. It answers with the tokens that it got, once it has all of them,
and ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from _engine_key import key

from penstock.engine.client import DataClient
from penstock.types import SamplingParams


class Clients:
    """One of each address, kept from round to round with its connections."""

    def __init__(self) -> None:
        self._of: dict[str, DataClient] = {}

    async def round(self, order: dict[str, Any]) -> int:
        """Tokens of all answers of a round."""
        clients = [self._of.setdefault(url, DataClient(url, api_key=key())) for url in order["urls"]]
        left = iter(range(order["requests"]))

        async def worker() -> int:
            made = 0
            for i in left:
                seed = order["seed"] + i
                tokens = random.Random(seed).randint(*order["tokens"])
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=seed)
                answer = await clients[i % len(clients)].sample([5 + i % 80, 6, 7], 1, params)
                made += sum(len(sample.token_ids) for sample in answer)
            return made

        return sum(await asyncio.gather(*(worker() for _ in range(order["concurrent"]))))

    async def close(self) -> None:
        """Close the connections."""
        for client in self._of.values():
            await client.close()


async def main() -> None:
    """One round for each line."""
    clients = Clients()
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await clients.round(json.loads(line)), flush=True)
    await clients.close()


if __name__ == "__main__":
    asyncio.run(main())
