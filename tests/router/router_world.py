"""A whole router before scripted engines, in this process, and what it was told: a judge of each placement."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from router_rig import Backend, RawClient, Reader, Seen, Writer, read_body, reply, request

from patience import eventually
from penstock.router.backend import Backend as RouterBackend
from penstock.router.gate import Waiter
from penstock.router.membership import EngineEntry, Membership
from penstock.router.server import Router
from penstock.router_settings import RouterConfig

NAMES = ("e0", "e1", "e2")


@dataclass
class Asked:
    """A request of a client."""

    number: int
    session: str | None
    version: int
    client: RawClient
    reading: asyncio.Task[tuple[int, bytes]]
    engines: list[str] = field(default_factory=list)
    """Where it was placed, one after another."""
    backend: RouterBackend | None = None
    """The last of them, as the router has it: under an old name, another one may be in the set by now."""


@dataclass
class Pending:
    """A request that an engine has, and what it is to do with it."""

    number: int
    engine: str
    verdict: asyncio.Future[str]


async def read_answer(client: RawClient) -> tuple[int, bytes]:
    """Status and body; status 0: the answer broke off, or there was none."""
    try:
        status, headers = await client.head()
        return status, await read_body(client.reader, headers)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b""


class World:
    """The router, its engines and its clients."""

    def __init__(self) -> None:
        self.backends = {name: Backend(self.serve, name) for name in NAMES}
        self.alive = set(NAMES)
        self.pending: list[Pending] = []
        self.asked: dict[int, Asked] = {}
        self.over: Counter[str] = Counter()
        """Requests that are over, by what their clients saw."""
        self.entries: dict[str, EngineEntry] = {}
        self.homes: dict[str, str] = {}
        self.closed = False
        self.wrong: list[str] = []
        self.epoch = self.count = 0

    async def start(self, policy: str) -> None:
        for backend in self.backends.values():
            await backend.start()
        self.router = Router(RouterConfig(policy=policy, max_held=20, max_hold_s=60, engine_metrics_interval_s=0))
        await self.router.start()
        self.dispatcher = self.router.dispatcher

    def announce(self) -> None:
        self.epoch += 1
        self.dispatcher.set_membership(Membership(self.epoch, tuple(self.entries.values()), self.closed))

    async def stop(self) -> None:
        await self.router.close()
        for backend in self.backends.values():
            await backend.stop()
        for asked in self.asked.values():
            asked.reading.cancel()
            asked.client.close()

    async def ask(self, session: str | None, version: int, tokens: int, more: str) -> None:
        self.count += 1
        client = await RawClient.connect(self.router.url)
        reading = asyncio.ensure_future(read_answer(client))
        self.asked[self.count] = Asked(self.count, session, version, client, reading)
        named = {"X-Session-ID": session, "X-Weight-Version": version, "X-Prompt-Tokens": tokens}
        headers = more + "".join(f"{name}: {given}\r\n" for name, given in named.items() if given)
        await client.send(request(f"/v1/completions?r={self.count}", b"body", headers))
        await eventually(lambda: self.router.metrics.requests == self.count)

    async def serve(self, backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        pending = Pending(
            int(seen.line.split()[1].partition("r=")[2]), backend.name, asyncio.get_running_loop().create_future()
        )
        self.pending.append(pending)
        closed = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([pending.verdict, closed], return_when=asyncio.FIRST_COMPLETED)
        if pending in self.pending:  # the router has closed the connection, or this engine was killed
            self.pending.remove(pending)
            return
        closed.cancel()
        await asyncio.wait([closed])
        match pending.verdict.result():
            case "answer":
                writer.write(reply(f"{backend.name} {pending.number}".encode()))
            case "error":
                writer.write(reply(f"{backend.name} {pending.number}".encode(), "500 Internal Server Error"))
            case "break":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\npart")
                writer.close()
            case _:
                writer.close()

    def judge(self, waiter: Waiter, engine: RouterBackend) -> None:
        """Note what is wrong with a placement, by what the router has been told."""
        asked = self.asked[int(waiter.request.target.partition(b"r=")[2])]
        entry = self.entries.get(engine.name)
        session = asked.session
        wrong = [
            what
            for what, so in {
                "not in the set": entry is None,
                "down": engine.down,
                "gate closed": self.closed,
                "excluded": engine in waiter.excluded,
            }.items()
            if so
        ]
        if entry is not None:
            here = session is not None and self.homes.get(session) == engine.name
            if not entry.eligible or (entry.draining and not here):
                wrong.append("not eligible, or draining and the session lives elsewhere")
            if entry.weight_version < asked.version:
                wrong.append("weights too old")
        if wrong:
            self.wrong.append(f"request {asked.number} on {engine.name}: {', '.join(wrong)}")
        asked.engines.append(engine.name)
        asked.backend = engine
        if session is not None:
            self.homes[session] = engine.name

    async def settle(self) -> None:
        """Until everyone asked is with an engine, held or answered, and the router knows of each engine what it has."""

        def in_the_set(pending: Pending) -> bool:
            asked = self.asked.get(pending.number)
            return asked is None or asked.backend is self.dispatcher.backends.get(pending.engine)

        def quiet() -> bool:
            self.collect()
            have = Counter(pending.engine for pending in self.pending if in_the_set(pending))
            known = {name: engine.outstanding for name, engine in self.dispatcher.placement.engines.items()}
            told = all(have[name] == outstanding for name, outstanding in known.items())
            return told and len(self.asked) == len(self.pending) + len(self.dispatcher.gate)

        for _ in range(3):  # what was only put off to the next turn of the loop
            await asyncio.sleep(0)
        await eventually(quiet)

    def collect(self) -> None:
        for asked in [asked for asked in self.asked.values() if asked.reading.done()]:
            del self.asked[asked.number]
            status, body = asked.reading.result()
            asked.client.close()
            if status in {200, 500}:
                name, number = body.decode().split()
                if int(number) != asked.number or name != asked.engines[-1]:
                    self.wrong.append(f"request {asked.number}, last on {asked.engines}, was answered {body!r}")
                self.over["answered"] += 1
            else:
                self.over["error" if status else "broken"] += 1
