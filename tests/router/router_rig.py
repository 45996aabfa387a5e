"""Raw backends and raw clients: bytes on the wire, so that what the router changes is seen."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from patience import asked
from penstock.router.membership import EngineEntry, Membership
from penstock.router.server import Router
from penstock.router.state import EngineLoad, RouterAdmin, RouterState
from penstock.router_settings import KEY_ENV, RouterConfig

Headers = list[tuple[str, str]]
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
both_loops = pytest.mark.parametrize("process", [False, True], ids=["asyncio", "uvloop"])
DATA_PATHS = "/v1/x,/v1/echo,/a,/b,/0,/1,/204,/304,/head,/options,/warm-up,/slow,/smuggled"
"""What tests ask for, besides the data calls of vLLM."""


async def read_head(reader: Reader) -> tuple[str, Headers]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    return first, [(n, v.strip()) for n, _, v in (line.partition(":") for line in lines)]


def value(headers: Headers, name: str) -> str | None:
    return next((v for n, v in headers if n.lower() == name), None)


async def read_chunks(reader: Reader) -> AsyncIterator[bytes]:
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size:
            yield (await reader.readexactly(size + 2))[:-2]
        else:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return


async def read_body(reader: Reader, headers: Headers) -> bytes:
    if (value(headers, "transfer-encoding") or "").lower() == "chunked":
        return b"".join([chunk async for chunk in read_chunks(reader)])
    return await reader.readexactly(int(value(headers, "content-length") or 0))


@dataclass
class Seen:
    """A request as an engine got it."""

    line: str
    headers: Headers
    body: bytes = b""

    def header(self, name: str) -> str | None:
        return value(self.headers, name)


def reply(body: bytes = b"ok", status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Answer = Callable[["Backend", Seen, Reader, Writer], Awaitable[None]]


async def answer_name(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    writer.write(reply(backend.name.encode()))


async def hang_up(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    writer.close()


def says(*pieces: bytes, then: Answer | None = None) -> Answer:
    """An engine that sends these, one after another, and then does as `then`."""

    async def answer(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001 if len(pieces) > 1 else 0)
        if then is not None:
            await then(backend, seen, reader, writer)

    return answer


async def stays(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
    """Say no more; only the router's disconnect ends it."""
    await reader.readexactly(1)


def held(then: Answer = answer_name) -> tuple[asyncio.Event, Answer]:
    """An event, and an engine that answers once it is set."""
    release = asyncio.Event()

    async def answer(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:
        await release.wait()
        await then(backend, seen, reader, writer)

    return release, answer


@dataclass
class Backend:
    """One raw engine. `answer` serves one request; closing the writer ends the connection."""

    answer: Answer = answer_name
    name: str = "e0"
    read_bodies: bool = True
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    """A connection was closed by the router."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    health: str = "200 OK"
    metrics: bytes = b""
    """What it answers to `GET /metrics`."""
    _server: asyncio.Server | None = None
    _writers: set[Writer] = field(default_factory=set)

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            # What is accepted while asyncio's server closes gets no transport, and stays open until it is collected
            # (Python 3.11): a request on it would wait for that. So no more is accepted, and what was gets here first.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            self._server = None

    @property
    def open(self) -> int:
        """Connections that the router has with it."""
        return len(self._writers)

    def entry(self, **more: Any) -> EngineEntry:
        return EngineEntry(self.name, f"http://127.0.0.1:{self.port}", **more)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        asked = False
        self._writers.add(writer)
        try:
            while not writer.is_closing():
                seen = Seen(*await read_head(reader))
                if seen.line.startswith("GET /health "):  # a probe is not a request
                    writer.write(reply(status=self.health))
                    continue
                if seen.line.startswith("GET /metrics "):  # nor is what the router itself wants to know
                    writer.write(reply(self.metrics))
                    return
                if not asked:
                    asked = True
                    self.connections += 1
                self.seen.append(seen)
                self.arrived.set()
                if self.read_bodies:
                    seen.body = await read_body(reader, seen.headers)
                await self.answer(self, seen, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            if asked:
                self.disconnected.set()
        finally:
            self._writers.discard(writer)
            writer.close()


@dataclass
class Answered:
    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> str | None:
        return value(self.headers, name)


class RawClient:
    """One connection to the router."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str, **options: Any) -> Self:
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, **options))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, Headers]:
        first, headers = await read_head(self.reader)
        return int(first.split()[1]), headers

    async def receive(self, *, head_only: bool = False) -> Answered:
        async with asyncio.timeout(60):
            status, headers = await self.head()
            framed = value(headers, "content-length") or value(headers, "transfer-encoding")
            if head_only or status in {204, 304}:
                body = b""
            elif framed:
                body = await read_body(self.reader, headers)
            else:
                body = await self.reader.read()
            return Answered(status, headers, body)

    async def ask(self, target: str = "/v1/x", body: bytes = b"", headers: str = "", method: str = "POST") -> Answered:
        await self.send(request(target, body, headers, method))
        return await self.receive(head_only=method == "HEAD")

    async def rest(self) -> bytes:
        """What comes until the router closes."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.transport.abort()


def request(target: str = "/v1/x", body: bytes = b"", headers: str = "", method: str = "POST") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {target} HTTP/1.1\r\nHost: test\r\n{headers}{length}\r\n".encode("latin-1") + body


def session(name: object, prompt_tokens: int = 0) -> str:
    return f"X-Session-ID: {name}\r\n" + (f"X-Prompt-Tokens: {prompt_tokens}\r\n" if prompt_tokens else "")


@dataclass
class Rig:
    """A router, its backends and an admin client."""

    url: str
    admin: RouterAdmin
    backends: list[Backend]
    router: Router | None
    """None where it is a process of its own."""
    pid: int
    clients: list[RawClient] = field(default_factory=list)
    epoch: int = 0
    entries: tuple[EngineEntry, ...] = ()
    closed: bool = False
    policy: dict[str, Any] = field(default_factory=dict)

    async def client(self, **options: Any) -> RawClient:
        client = await RawClient.connect(self.url, **options)
        self.clients.append(client)
        return client

    async def control(self, process: int = 0) -> RawClient:
        """A connection to a control port."""
        client = await RawClient.connect((await self.admin._urls())[process])
        self.clients.append(client)
        return client

    async def announce(self, entries: Sequence[EngineEntry]) -> None:
        self.entries = tuple(entries)
        await self.again()

    async def again(self) -> None:
        """Announce what was announced, as another epoch."""
        self.epoch += 1
        await self.admin.announce(Membership(self.epoch, self.entries, self.closed, self.policy))

    async def gate(self, *, closed: bool) -> None:
        self.closed = closed
        await self.again()

    async def set_policy(self, policy: str, **options: float) -> None:
        self.policy = {**self.policy, "policy": policy, **options}
        await self.again()

    async def load(self, name: str) -> EngineLoad:
        return next(engine for engine in (await self.admin.engines()).engines if engine.name == name)

    async def until(self, holds: Callable[[RouterState], bool]) -> RouterState:
        """State once `holds` of it."""
        return await asked(self.admin.engines, holds)

    async def settled(self) -> RouterState:
        """State once nothing is outstanding."""
        return await self.until(lambda state: not state.held and not any(e.outstanding for e in state.engines))

    async def until_held(self, held: int) -> None:
        await self.until(lambda state: state.held == held)


@asynccontextmanager
async def rig(
    *answers: Answer,
    process: bool = False,
    api_key: str | None = None,
    admin_key: str | None = None,
    read_bodies: bool = True,
    log: Path | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A router before one backend for each of `answers`; `process`: on uvloop, in a process of its own."""
    config = {"data_paths": DATA_PATHS, "allowed_hosts": "test", **config}
    async with AsyncExitStack() as stack:
        backends: list[Backend] = []
        for i, answer in enumerate(answers):
            backend = Backend(answer, f"e{i}", read_bodies)
            backends.append(await backend.start())
            stack.push_async_callback(backend.stop)
        router = None
        if process:
            url, pid = await stack.enter_async_context(router_process(api_key=api_key, log=log, **config))
        else:
            router = Router(RouterConfig(**config), api_key=api_key, admin_key=admin_key)
            await router.start()
            stack.push_async_callback(router.close)
            url, pid = router.url, os.getpid()
        admin = RouterAdmin(url, admin_key or api_key)
        stack.push_async_callback(admin.close)
        made = Rig(url, admin, backends, router, pid)
        stack.callback(lambda: [client.close() for client in made.clients])
        if backends:
            await made.announce([backend.entry() for backend in backends])
        yield made


@asynccontextmanager
async def router_process(
    *, api_key: str | None = None, log: Path | None = None, **config: Any
) -> AsyncIterator[tuple[str, int]]:
    """Its address and process; `log` gets what it writes to stderr."""
    options = RouterConfig(**config).model_dump_json(exclude={"kind", "url"})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.router", options,
        stdout=asyncio.subprocess.PIPE, stderr=log and log.open("wb"), env={**os.environ, KEY_ENV: api_key or ""},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("penstock router ready on http://127.0.0.1:"), line
        yield line.split()[-1], process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(60):
            assert await process.wait() == 0
