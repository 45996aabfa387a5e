"""The HTTP server of control calls: an engine core's, past the API server, and a router's."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import pytest

from patience import WAIT_S, eventually
from penstock import control_server
from penstock.control_server import ControlServer, listen, respond
from penstock.errors import TransferError, WeightsError


@pytest.fixture
def server():
    def begin(data: bytes) -> Future[Any]:
        body, done = orjson.loads(data), Future[Any]()
        match body["what"]:
            case "torn":
                done.set_exception(TransferError("half of it"))
            case "refused":
                done.set_exception(WeightsError("they do not fit"))
            case "unforeseen":
                done.set_exception(KeyError("x"))
            case "deep":
                raise RecursionError("nested deeper than this Python goes")  # which depends on its version
            case "slow":
                threading.Timer(0.1, done.set_result, ({"late": True},)).start()
            case _:
                done.set_result({"ok": True})
        return done

    routes = {"POST /do": lambda data: respond(lambda: begin(data)), "GET /text": lambda _: (200, "a text\n")}
    served = ControlServer(listen("127.0.0.1", 0), routes, lambda _: ["secret"])
    yield f"http://127.0.0.1:{served.port}"
    served.close()


WRONG = {"error": "the key is wrong for this call: send Authorization: Bearer KEY"}


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "answer"),
    [
        ("/do", {"what": "x"}, "secret", 200, {"ok": True}),
        ("/do", {"what": "slow"}, "secret", 200, {"late": True}),
        ("/do", {"what": "torn"}, "secret", 409, {"error": "half of it", "torn": True}),
        ("/do", {}, "secret", 400, {"error": "malformed body: KeyError('what')"}),
        ("/do", {"what": "x"}, "wrong", 401, WRONG),
        ("/no", {}, "secret", 404, {"error": "no such route: POST /no"}),
        ("/do", {"what": "refused"}, "secret", 400, {"error": "they do not fit"}),
        ("/do", {"what": "unforeseen"}, "secret", 500, {"error": "KeyError('x')"}),
        ("/do", {"what": "x" * 10 * 2**20}, "secret", 200, {"ok": True}),
        ("/do", {"what": "x" * 64 * 2**20}, "secret", 400, {"error": "the body is larger than 67108864 bytes"}),
        ("/do", {"what": "x" * 2**20}, "wrong", 401, WRONG),
    ],
)
async def test_the_server_in_the_core_answers(server, path, body, key, status, answer):
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(server + path, json=body) as response,
    ):
        assert (response.status, await response.json()) == (status, answer)


def said_by(server: str, sent: bytes) -> bytes:
    """All that the server says to these bytes, until it ends the connection or a whole answer is there."""
    host, _, port = server.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(sent)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
            if b"}" in piece:
                break
        return answer


HEAD = b"POST /do HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (HEAD.replace(b"secret", b"wrong") + b"\r\n", 401, "key is wrong"),
        (HEAD.replace(b"Authorization", b"X") + b"\r\n", 401, "key is missing"),
        (HEAD + b"Origin: http://evil\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", 403, "Origin"),
        (HEAD.replace(b"127.0.0.1", b"evil.example") + b"\r\n", 403, "not called 'evil.example'"),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400, "Content-Length"),
        (HEAD + b"Content-Length: 1_0\r\n\r\n", 400, "Content-Length"),
        (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400, "Content-Length"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "Content-Length"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400, "Transfer-Encoding"),
        (HEAD + b"Content-Length: 2000\r\n\r\n" + b"[" * 1000 + b"]" * 1000, 400, "malformed body"),
        (HEAD + b"Content-Length: 9\r\n\r\n[[[[[[[[[", 400, "malformed body"),
        (HEAD + b'Content-Length: 16\r\n\r\n{"what": "deep"}', 400, "malformed body"),
    ],
)
def test_what_it_does_not_take_is_named(server: str, sent: bytes, status: int, says: str) -> None:
    answer = said_by(server, sent).decode()
    assert (answer.split(" ")[1], says in answer) == (str(status), True), answer


def test_a_client_that_waits_before_its_body_is_asked_for_it_at_once(server: str) -> None:
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2])), timeout=WAIT_S) as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 13\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")
        client.sendall(b'{"what": "x"}')
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_text_is_sent_as_it_is(server: str) -> None:
    said = said_by(server, HEAD.replace(b"POST /do", b"GET /text?x") + b"Connection: close\r\n\r\n").decode()
    assert said.startswith("HTTP/1.1 200 ")
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in said
    assert said.endswith("\r\n\r\na text\n")


def test_a_closed_server_frees_its_port_and_ends_its_connections() -> None:
    served = ControlServer(listen("127.0.0.1", 0), {}, lambda _: ["secret"])
    with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as idle:
        idle.sendall(b"POST")
        time.sleep(0.05)  # it is accepted
        served.close()
        assert idle.recv(1) == b""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with suppress(OSError):
            listen("127.0.0.1", served.port).close()
            return
        time.sleep(0.02)
    pytest.fail("its port is still taken")


def test_an_open_server_keeps_few_connections_also_of_those_that_made_calls() -> None:
    served = ControlServer(listen("127.0.0.1", 0), {"GET /x": lambda _: (200, {})}, lambda _: [])
    kept: list[socket.socket] = []
    for _ in range(2 * control_server.STRANGERS):
        kept.append(socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S))
        kept[-1].sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept[-1].recv(99).startswith(b"HTTP/1.1 200")
    assert len(served.deadlines) <= control_server.STRANGERS + 8
    served.close()
    for connection in kept:
        connection.close()


def test_a_body_that_trickles_ends_by_one_deadline(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "REQUEST_S", 0.5)
    monkeypatch.setattr(control_server, "STRANGER_S", 0.5)
    for head in (HEAD + b"Content-Length: 9999\r\n\r\n", b"POST /do HTTP/1.1\r\nX: "):  # the second is a stranger's
        host, _, port = server.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(head)
            began = time.monotonic()
            with pytest.raises(ConnectionError):  # noqa: PT012 - whichever byte is refused
                while time.monotonic() - began < WAIT_S:
                    connection.sendall(b"1")
                    time.sleep(0.02)


def test_strangers_do_not_keep_its_fleet_out(server: str) -> None:
    host, _, port = server.removeprefix("http://").partition(":")
    before = threading.active_count()
    idle = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(5 * control_server.STRANGERS)]
    try:
        assert b'{"ok":true}' in said_by(server, HEAD + b"Content-Length: 12\r\n\r\n" + b'{"what":"x"}')
        assert idle[0].recv(1) == b"", "the oldest made room"
        asyncio.run(eventually(lambda: threading.active_count() <= before + control_server.STRANGERS + 8))
    finally:
        for connection in idle:
            connection.close()
