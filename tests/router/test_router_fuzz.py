"""Differential fuzz: whatever is sent, the router reads what llhttp and h11 read, and an engine behind it nothing else.

Each case is a valid message with seeded mutations, cut at random places. Requests go through a router, and what each
connection to an engine gets is read by uvicorn's protocol before the route table of the vLLM in use. Answers are
`test_router_splits.py`.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any

import httptools
import pytest
import router_rig
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from test_router_splits import Message, Pair, Wire, by_h11, cut, read
from test_vllm_routes import app_routes, module_routes
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.router.server import DATA_PATHS
from penstock.router.unserved import CONTROL_PATHS

CASES, MANY = 5_000, 1_000_000
SEED = 20_261_123
HOP_BY_HOP = b"connection keep-alive proxy-connection proxy-authorization te upgrade http2-settings".split()
ENDS_HERE = {*HOP_BY_HOP, b"expect", b"trailer", b"authorization", b"x-api-key", b"x-data-parallel-rank"}
FRAMING = {b"content-length", b"transfer-encoding"}
TARGETS = [b"/v1/completions", b"/v1/chat/completions?a=b", b"/v1/models", b"/tokenize", b"/a", b"/b?c"]
HEADS = [
    b"Host: a", b"host:test:80", b"Content-Length: 5", b"Content-Length: 0", b"Transfer-Encoding: chunked",
    b"Connection: close", b"Connection:", b"Connection: keep-alive,", b"Connection: , close", b"Connection: x-a, te",
    b"Connection: content-length", b"X-A: 1", b"x-a: 2", b"X-Session-ID: s", b"Expect: 100-continue", b"Upgrade: h2c",
    b"Authorization: Bearer k", b"X-API-Key: k", b"X-Data-Parallel-Rank: 1", b"TE: trailers", b"Trailer: X-T",
    b"Keep-Alive: timeout=5", b"Accept: */*", b"Content-Type: application/json", b"X-Weight-Version: 0", b"Empty:",
    b"Transfer-Encoding: gzip, chunked", b"Content-Length: 5, 5", b"Transfer-Encoding: identity",
]  # fmt: skip
FRAMES = [[], [b"Content-Length: 5"], [b"Transfer-Encoding: chunked"], [b"Transfer-Encoding: chunked"]]
CHUNKS = [b"3\r\nabc\r\n", b"1\r\nd\r\n", b"1\r\nd\r\n", b'2;a="b;c"\r\nef\r\n', b"00A\r\n0123456789\r\n"]
ENDS = [b"0\r\n\r\n", b"0\r\n\r\n", b"000\r\n\r\n", b"0;e\r\n\r\n", b"000\r\nA: b\r\nC:\r\n\r\n"]
ODD = [
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\x00", b"\x0b", b"\x0c", b"\x1f", b"\x7f", b"\x80", b"\xff",
    b":", b";", b",", b"=", b'"', b"\\", b"%0a", b"%2e", b"//", b"/./", b"/../", b"#", b"?", b"0", b"1", b"9", b"a",
    b"f", b"-", b"+", b"x", b"HTTP/1.0", b"HTTP/1.1", b"0x", b"close", b"chunked", b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Connection: ,\r\n", b"GET /pause HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\r\n folded", b"\r\nBroken", b"\r\nSp : a", b"\r\nA:\x00",
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(6):
            case 0:
                raw[at:at] = rng.choice(ODD)
            case 1:
                raw[at : at + 1] = rng.choice(ODD)
            case 2:
                del raw[at : at + rng.randrange(1, 4)]
            case 3:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 4:
                start = rng.randrange(len(raw) + 1)
                raw[at:at] = raw[start : start + rng.randrange(20)]
            case _:
                raw[at:at] = b"\r\n" + rng.choice(HEADS) + b"\r\n"
    return bytes(raw) if raw != data else mutated(rng, data)


def body_for(rng: random.Random, lines: list[bytes]) -> bytes:
    joined = b"\r\n".join(lines).lower()
    if b"chunked" in joined:
        return b"".join(rng.choices(CHUNKS, k=rng.randrange(4))) + rng.choice(ENDS)
    return b"hello" if b"content-length: 5" in joined else b""


def request(rng: random.Random) -> bytes:
    method = rng.choice([b"GET", b"POST", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS"])
    target = rng.choice([*TARGETS, *sorted(CONTROL_PATHS)[:3]])
    lines = [b"Host: a", *rng.choice(FRAMES), *rng.sample(HEADS, rng.choice([0, 0, 1, 2, 4]))]
    rng.shuffle(lines)
    version = rng.choice([b"1.1"] * 14 + [b"1.0", b"2.0"])
    return b"%b %b HTTP/%b\r\n%b\r\n\r\n" % (method, target, version, b"\r\n".join(lines)) + body_for(rng, lines)


# --- other readers ---------------------------------------------------------------------------------------------------


class _Callbacks:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.parser: Any = None
        self.on_message_begin()

    def on_message_begin(self) -> None:
        self.url = self.body = b""
        self.in_head = True
        self.fields: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # and not a trailer
            self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.in_head = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages.append(Message(self.parser.get_method(), self.url, tuple(self.fields), self.body))


def by_llhttp(data: bytes) -> tuple[list[Message], bool]:
    """Complete requests, and whether the rest is bad or an upgrade."""
    callbacks = _Callbacks()
    callbacks.parser = httptools.HttpRequestParser(callbacks)
    try:
        callbacks.parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return callbacks.messages, True
    return callbacks.messages, False


def passed_on(message: Message) -> tuple[tuple[bytes, bytes], ...]:
    """The fields of a request that an engine is to get, framing apart."""
    options = {
        option.strip(b" \t").lower()
        for name, value in message.fields
        if name == b"connection"
        for option in value.split(b",")
    }
    return tuple(field for field in message.fields if field[0] not in ENDS_HERE | FRAMING | options)


class Later:
    """What uvicorn needs of a loop: its tasks run when all that came was read, and no timer does."""

    def __init__(self) -> None:
        self.tasks: list[Coroutine[Any, Any, None]] = []

    def create_task(self, task: Coroutine[Any, Any, None]) -> Later:
        self.tasks.append(task)
        return self

    def call_later(self, *_: Any) -> Later:
        return self

    def add_done_callback(self, _: Any) -> None:
        """Of a task."""

    def cancel(self) -> None:
        """Of a timer."""

    def run(self) -> None:
        while self.tasks:
            with pytest.raises(StopIteration):  # at once: the routes wait for nothing
                self.tasks.pop(0).send(None)


class Socketless(Wire):
    """The server's end of a connection."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 - asyncio's signature
        return default


class VllmServer:
    """A uvicorn with vLLM's routes; notes which of them run."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self.ran: list[str] = []
        found: list[BaseRoute] = []
        for route in routes:
            if isinstance(route, Mount):
                found.append(Mount(route.path, routes=[Route("/{rest:path}", self._noting(route.path))]))
            elif isinstance(route, Route):
                found.append(Route(route.path, self._noting(route.path), methods=sorted(route.methods or ())))
        app = Starlette(routes=found)
        self._config = Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
        self._config.load()

    def _noting(self, path: str) -> Any:
        async def answer(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
            self.ran.append(path)
            return Response()

        return answer

    def reads(self, data: bytes) -> tuple[int, list[str]]:
        """How many requests it reads on one connection, and the routes that run."""
        self.ran.clear()
        loop, state = Later(), ServerState()
        protocol = HttpToolsProtocol(self._config, state, {}, loop)  # type: ignore[arg-type]
        protocol.connection_made(Socketless())
        protocol.data_received(data)
        loop.run()
        return state.total_requests, self.ran


# --- requests --------------------------------------------------------------------------------------------------------


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


def exchange(pieces: list[bytes]) -> tuple[list[Message], list[bytes], bytes]:
    """The requests that engines get, what each connection to them carried, and what the client gets.

    Each request is answered at once when it is complete.
    """
    pair = Pair(connections=6)
    requests: list[Message] = []
    answered = [0] * len(pair.engines)

    def answer_one() -> bool:
        for i, (connection, wire) in enumerate(pair.engines):
            messages = by_llhttp(wire.written)[0]
            if len(messages) > answered[i]:
                answered[i] += 1
                requests.append(messages[-1])
                if connection.user is not None:
                    read(connection, OK if messages[-1].method == b"HEAD" else OK + b"ok")
                return True
        return False

    for piece in pieces:
        if not pair.wire.closing:
            pair.client.data_received(piece)
        while answer_one():
            pass
    pair.client.connection_lost(None)
    return requests, [wire.written for _, wire in pair.engines if wire.written], pair.wire.written


def check_request(data: bytes, places: list[int], seen: Counter[str], server: VllmServer) -> None:
    """One case; `seen` counts what became of them, so that the fuzz is known to reach both sides of each judgement."""
    engine, wires, to_client = exchange(cut(data, places))
    for wire in wires:
        messages, bad = by_llhttp(wire)
        assert not bad, "an engine finds what it gets malformed"
        assert by_h11(wire) == (messages, False), "two engines read it in different ways"
        count, ran = server.reads(wire)
        assert count >= len(messages), "uvicorn reads fewer"  # it answers one whose body has not all come, too
        assert RUN_BY_DATA.issuperset(ran)
        seen["ran"] += len(ran)
    given, gave_up = by_llhttp(data.lstrip(b"\r\n"))
    wanted = [message for message in given if message.target.partition(b"?")[0] in SERVED]
    seen["passed"] += len(engine)
    seen["kept"] += len(given) - len(engine)
    seen["bad"] += gave_up
    seen.update(f"refused {status.decode()}" for status in re.findall(rb"HTTP/1\.1 (4..|5..) ", to_client))
    assert len(engine) <= len(wanted)
    for ours, theirs in zip(engine, wanted, strict=False):
        assert (ours.method, ours.target, ours.body) == (theirs.method, theirs.target, theirs.body)
        fields = tuple(field for field in ours.fields if field[0] not in FRAMING)
        said = passed_on(theirs)
        assert fields == said
        names = [name for name, _ in ours.fields]
        assert names.count(b"host") == 1
        assert sum(names.count(name) for name in FRAMING) <= 1
        assert not ENDS_HERE.intersection(names)
    assert to_client.count(b"HTTP/1.1 200 OK\r\n") >= len(engine)


RUN_BY_DATA = {path.decode() for path in DATA_PATHS}
SERVED = DATA_PATHS | {path.encode() for path in router_rig.DATA_PATHS.split(",")}


# --- runs ------------------------------------------------------------------------------------------------------------


async def fuzz(cases: int, seed: int, server: VllmServer) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for number in range(cases):
        data = request(rng)
        if number % 4 == 1:
            data += request(rng)
        data = mutated(rng, data)
        places = [rng.randrange(500) for _ in range(rng.randrange(3))]
        try:
            check_request(data, places, seen, server)
        except Exception as error:  # the case has to be named, whatever fails in it
            raise AssertionError(f"case {number} of seed {seed}, cut at {places}: {data!r}") from error
        if number % 500 == 0:
            await asyncio.sleep(0)  # what the router left for the loop
    return seen


BOTH_SIDES = {"passed", "kept", "bad", "ran", "refused 400", "refused 501", "refused 505"}
pytestmark = pytest.mark.vllm


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> VllmServer:
    return VllmServer([*app_routes(monkeypatch), *module_routes()])


async def test_no_mutation_is_read_in_two_ways(server: VllmServer) -> None:
    seen = await fuzz(CASES, SEED, server)
    assert set(seen) >= BOTH_SIDES
    assert min(seen[what] for what in BOTH_SIDES) >= 10, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_no_mutation_of_very_many_is_read_in_two_ways(server: VllmServer) -> None:
    for seed in range(MANY // CASES):
        await fuzz(CASES, seed, server)
