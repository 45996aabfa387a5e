"""The load of `updates.py`, a process of its own: its event loop, which has all answers to read, lags up to 0.3 s.

python benchmarks/_update_load.py ROUTER_URL ENGINE_URL...

Reads lines on stdin: `ask N` keeps N requests to the fleet in flight, `ask_naively N` as many to its engines past the
fleet; `so_far` changes nothing; `stop` lets those in flight end. Each is answered, when it is done, with a line of JSON
of the load that was begun last: `{"received", "thrown_away", "requeued"}` in tokens, and `"failed"` in requests. It
ends at the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from _closed_loop import ClosedLoop
from _engine_key import key

from penstock import wire
from penstock.engine.client import GENERATE
from penstock.fleet.fleet import Fleet
from penstock.http import HttpTransport
from penstock.types import SamplingParams

PARAMS = SamplingParams(max_tokens=128, ignore_eos=True, detokenize=False)
POLL_S = 0.5
REQUEST_S = 300.0


class Load:
    """Clients of a fleet, and of the same engines as the naive loop's clients see them."""

    def __init__(self, fleet: Fleet, urls: Sequence[str]) -> None:
        self.https = [HttpTransport(url, api_key=key()) for url in urls]
        self._fleet = fleet
        self._thrown_away = self._requeued = 0
        self._loop = ClosedLoop(self.ask, 0)

    async def ask(self, i: int) -> int:
        """One request as a user of the fleet makes it."""
        (sample,) = await self._fleet.sample([5 + i % 80, 6, 7], 1, PARAMS)
        return len(sample.token_ids)

    async def ask_naively(self, i: int) -> int:
        """One request to one engine, from the start again where it was cut."""
        http = self.https[i % len(self.https)]
        body = wire.generate_body([5 + i % 80, 6, 7], PARAMS)
        while True:
            (choice,) = (await http.post(GENERATE, body, timeout_s=REQUEST_S))["choices"]
            if choice["finish_reason"] != "abort":
                return len(choice["token_ids"])
            self._thrown_away += len(choice["token_ids"])
            while (await http.get("/is_paused", timeout_s=REQUEST_S))["is_paused"]:  # noqa: ASYNC110 - as the field does
                await asyncio.sleep(POLL_S)

    async def do(self, command: str) -> str:
        """What a line says, and the answer to it."""
        match command.split():
            case ["ask" | "ask_naively" as way, concurrent]:
                self._thrown_away, self._requeued = 0, self._fleet.counters.requeued_tokens
                self._loop = ClosedLoop(getattr(self, way), int(concurrent))
                await self._loop.__aenter__()
            case ["stop"]:
                await self._loop.__aexit__(None, None, None)
            case ["so_far"]:
                pass
            case _:
                raise ValueError(f"no such command: {command!r}")
        figures = {
            "received": self._loop.received,
            "thrown_away": self._thrown_away,
            "requeued": self._fleet.counters.requeued_tokens - self._requeued,
            "failed": len(self._loop.failed),
        }
        return json.dumps(figures)


async def main() -> None:
    """Run until the end of stdin."""
    router, *urls = sys.argv[1:]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Fleet.connect(router) as fleet:
        load = Load(fleet, urls)
        while command := (await reader.readline()).decode().strip():
            print(await load.do(command), flush=True)
        for http in load.https:
            await http.close()


if __name__ == "__main__":
    asyncio.run(main())
