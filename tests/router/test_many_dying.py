"""Thousands of requests while engines die in the middle of answers: every one is answered, or said not to be."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import aiohttp
from router_rig import Backend, RawClient, Rig, Seen, eventually, read_body, request, rig, value

from patience import WAIT_S

ENGINES = 8
WORKERS = 64
EVERY = 100
"""Of the requests, one in so many kills the engine that answers it."""
AWAY_S = 0.05
"""How long a dead engine is away; it comes back as another process would, at the same address."""
DEADLINE_S = WAIT_S
"""Of one request."""
LINE = re.compile(r'^penstock_router_(\w+)_total(?:\{\w+="([^"]*)"\})? (\S+)$', re.MULTILINE)


def body_of(number: str) -> bytes:
    return f"answer to {number} ".encode() * 100


@dataclass
class Engines:
    """What they did."""

    begun: int = 0
    finished: int = 0
    """Answers written in full; the router need not have read them before a death."""
    deaths: int = 0
    away: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def answer(
        self, backend: Backend, seen: Seen, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if backend.name in self.away:  # a connection that was accepted when it died
            writer.transport.abort()
            return
        self.begun += 1
        number = seen.header("x-number") or ""
        head, first, second = answer_to(number)
        writer.write(head + first)
        await writer.drain()
        await asyncio.sleep(0.005)
        if int(number) % EVERY == 0 and backend.name not in self.away:
            self.deaths += 1
            self.away[backend.name] = asyncio.create_task(self._die(backend))
            return
        writer.write(second)
        await writer.drain()
        self.finished += 1

    async def _die(self, backend: Backend) -> None:
        await backend.stop()  # its listening socket, and every connection, with other answers on their way
        await asyncio.sleep(AWAY_S)
        del self.away[backend.name]
        await backend.start()


def answer_to(number: str) -> tuple[bytes, bytes, bytes]:
    """Its head, and its body in two pieces; the odd ones are chunked."""
    content = body_of(number)
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    if int(number) % 2 == 0:
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode(), *halves
    first, second = (f"{len(half):x}\r\n".encode() + half + b"\r\n" for half in halves)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", first, second + b"0\r\n\r\n"


async def ask(client: RawClient, number: int) -> str:
    """`answered`, `broken` after its head has come, or the router's own word for why not."""
    session = f"X-Session-ID: s{number % 40}\r\n" if number % 3 else ""
    await client.send(request(body=b"x" * 500, headers=f"X-Number: {number}\r\n{session}"))
    status, headers = await client.head()  # one without a head fails the test: that would be no clear error
    expected = body_of(str(number))
    try:
        content = await read_body(client.reader, headers)
    except (asyncio.IncompleteReadError, ConnectionResetError) as error:
        partial = getattr(error, "partial", b"")
        own = value(headers, "content-length") is None or expected.startswith(partial)
        return "broken" if own else f"broken, with {partial[:20]} of another request"
    if status == 200:
        assert content == expected
        return "answered"
    reason = value(headers, "x-penstock-error")
    assert status in {502, 503}
    assert reason, content
    return reason


async def worker(router: Rig, numbers: list[int], outcomes: Counter[str]) -> None:
    client = await router.client()
    while numbers:
        number = numbers.pop()
        async with asyncio.timeout(DEADLINE_S):
            outcome = await ask(client, number)
        outcomes[outcome] += 1
        if outcome != "answered":
            client.close()
            client = await router.client()


async def metrics(url: str) -> dict[str, Counter[str]]:
    """Counters by name without prefix, each by the value of its label, `""` where it has none."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/router/metrics") as response:
        text = await response.text()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, label, figure in LINE.findall(text):
        found[name][label] += int(float(figure))
    return found


async def test_every_request_has_an_answer_or_a_clear_error_and_the_counters_add_up() -> None:
    requests = 3_000
    engines, outcomes = Engines(), Counter[str]()
    numbers = list(range(1, requests + 1))
    async with rig(*[engines.answer] * ENGINES, process=True, max_hold_s=10) as router:
        await asyncio.gather(*(worker(router, numbers, outcomes) for _ in range(WORKERS)))
        await asyncio.gather(*engines.away.values())
        state = await router.settled()
        counted = await metrics(router.url)
        errors = Counter({name: n for name, n in outcomes.items() if name not in {"answered", "broken"}})

        assert outcomes.total() == requests
        assert counted["requests"][""] == state.requests == requests
        assert counted["answered"][""] == outcomes["answered"]
        assert counted["broken"][""] == outcomes["broken"]
        assert +counted["errors"] == errors
        assert counted["cancelled"][""] == 0

        again = counted["retries"].total()
        # A second try that has nowhere to go counts as one; a request that has lost two engines gets none.
        least = requests + again - (sum(errors.values()) - errors["engine_failed"])
        placed = sum(engine.requests for engine in state.engines)
        assert least <= placed <= least + errors["engines_failed"]
        assert outcomes["answered"] <= engines.finished <= engines.begun <= placed
        assert engines.begun <= outcomes["answered"] + outcomes["broken"] + counted["retries"].total()

        assert engines.deaths > 0.9 * requests / EVERY
        assert outcomes["broken"] >= 0.9 * engines.deaths, "what an engine had begun to say is not said anew"
        assert outcomes["answered"] > 0.6 * requests, outcomes
        await eventually(lambda: all_up(router))  # and everybody is back in use
        assert all(backend.seen for backend in router.backends)


async def all_up(router: Rig) -> bool:
    return not any(engine.down for engine in (await router.admin.engines()).engines)
