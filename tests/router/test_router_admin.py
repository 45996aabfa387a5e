from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from router_rig import Backend, RawClient, Reader, Seen, Writer, answer_name, held, request, rig

from patience import WAIT_S, eventually
from penstock.errors import ConfigError, EngineHTTPError, StateError, UserError
from penstock.options import validate
from penstock.router.dispatcher import Histogram
from penstock.router.figures import histogram
from penstock.router.membership import EngineEntry, Membership
from penstock.router.server import Router
from penstock.router.state import RouterAdmin
from penstock.router_settings import RouterConfig, refuse_open_host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    refuse_open_host(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", ""])
def test_an_address_beyond_loopback_needs_a_key(host: str) -> None:
    for key in (None, ""):
        with pytest.raises(ConfigError, match="no API key"):
            refuse_open_host(host, key)
    refuse_open_host(host, "k")


async def test_a_web_page_cannot_change_anything() -> None:
    """A page that a developer looks at may post to any port of that machine, without a preflight."""
    async with rig(answer_name) as r:
        page = {"Origin": "http://example.org", "Content-Type": "text/plain"}
        async with aiohttp.ClientSession(headers=page) as browser:
            for url in (r.url, *await r.admin._urls()):
                async with browser.put(f"{url}/router/engines", data='{"epoch": 9, "engines": []}') as answer:
                    assert (answer.status, "leave Origin out" in await answer.text()) == (403, True)
            for path in ("/router/engines", "/router/metrics", "/metrics", "/router/health", "/"):
                async with browser.get(r.url + path) as answer:
                    assert (answer.status, answer.headers["X-Penstock-Error"]) == (403, "cross_site")
        client = await r.client()
        for method, path in (("GET", "/router/engines"), ("PUT", "/router/engines"), ("GET", "/metrics")):
            for connection in (client, await r.control()):
                await connection.send(f"{method} {path} HTTP/1.1\r\nHost: made.to.point.here\r\n\r\n".encode())
                answer = await connection.receive()
                assert (answer.status, b"name it in router.allowed_hosts" in answer.body) == (403, True)
        assert (await client.ask(headers="Origin: http://example.org\r\n")).status == 200, "the key guards data calls"
        assert (await r.admin.engines()).epoch == 1


async def test_names_of_the_router_itself_are_good() -> None:
    async with rig(answer_name, allowed_hosts=["router.internal", "other"]) as r:
        client, control = await r.client(), await r.control()
        for host in ("127.0.0.1:8000", "[::1]:80", "LOCALHOST", socket.gethostname(), "router.internal:1", "10.1.2.3"):
            await client.send(f"GET /router/engines HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await client.receive()).status == 200, host
            await control.send(f"GET /router/engines HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            assert (await control.receive()).status == 200, host


async def test_the_admin_key_is_needed_to_change_the_router() -> None:
    bodies = {
        ("PUT", "/router/engines"): b'{"epoch": 9, "engines": []}',
        ("POST", "/router/choose"): b"{}",
        ("POST", "/router/sessions/finish"): b'{"session_id": "s"}',
        ("GET", "/router/engines"): b"",
        ("GET", "/metrics"): b"",
    }
    async with rig(answer_name, api_key="data", admin_key="admin", max_hold_s=0.1) as r:

        async def statuses(key: str) -> list[int]:
            headers = f"Authorization: Bearer {key}\r\n" if key else ""
            calls = reversed(bodies.items())
            return [
                (await (await r.control()).ask(path, body, headers, method)).status for (method, path), body in calls
            ]

        assert await statuses("") == await statuses("wrong") == [401] * 5
        assert await statuses("data") == [200, 200, 200, 200, 401]
        assert (await r.admin.engines()).epoch == 1
        assert await statuses("admin") == [200] * 5
        client = await r.client()
        for key in ("data", "admin"):
            assert (await client.ask(headers=f"Authorization: Bearer {key}\r\n")).status == 503, "no engine is left"


async def test_an_announcement_gets_through_while_no_descriptor_is_left() -> None:
    async with rig(answer_name, process=True) as r:
        router = psutil.Process(r.pid)
        most = router.num_fds() + 20
        resource.prlimit(r.pid, resource.RLIMIT_NOFILE, (most, most))
        clients = [await r.client() for _ in range(40)]
        await eventually(lambda: router.num_fds() >= most - 1)
        await r.gate(closed=True)
        assert (await r.admin.engines()).gate_closed
        for client in clients:
            client.close()


async def test_an_announcement_gets_through_between_streams() -> None:
    async def stream(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await writer.drain()

    async def read(client: RawClient) -> None:
        while await client.reader.read(1 << 16):
            pass

    async with rig(stream, process=True) as r:
        clients = [await r.client() for _ in range(20)]
        for client in clients:
            await client.send(request())
        reading = [asyncio.create_task(read(client)) for client in clients]
        await r.until(lambda state: state.engines[0].outstanding == 20)
        for closed in (True, False) * 5:
            async with asyncio.timeout(WAIT_S):
                await r.gate(closed=closed)
        assert not any(task.done() for task in reading)
        for task in reading:
            task.cancel()


async def test_without_a_clients_key_changes_alone_need_the_admin_key() -> None:
    async with rig(answer_name, admin_key="admin") as r:
        assert (await (await r.control()).ask("/router/engines", method="GET")).status == 200
        refused = await (await r.control()).ask("/router/engines", b'{"epoch": 9, "engines": []}', method="PUT")
        assert (refused.status, b"the key is missing" in refused.body) == (401, True)
        assert (await (await r.client()).ask()).status == 200


async def test_a_change_at_the_data_port_is_refused_and_changes_nothing() -> None:
    async with rig(answer_name, api_key="data", admin_key="admin") as r:
        client = await r.client()
        (port,) = json.loads((await client.ask("/router/health", method="GET")).body)["control_ports"]
        for key in ("data", "admin"):
            for method, path, body in (
                ("PUT", "/router/engines", b'{"epoch": 9, "engines": []}'),
                ("POST", "/router/choose", b"{}"),
                ("POST", "/router/sessions/finish", b'{"session_id": "s"}'),
            ):
                answer = await client.ask(path, body, f"Authorization: Bearer {key}\r\n", method)
                assert (answer.status, answer.header("x-penstock-error")) == (421, "control_port")
                assert f"{method} {path} is no call of this port; make it on the control port: {port}" in str(
                    answer.body
                )
        assert (await r.admin.engines()).epoch == 1
        assert (await client.ask(headers="Authorization: Bearer data\r\n")).status == 200


async def test_the_control_port_can_be_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose"):
            await Router(RouterConfig(control_port=port)).start()
    async with rig(answer_name, control_port=port) as r:
        assert await r.admin._urls() == [f"http://127.0.0.1:{port}"]


async def test_a_router_at_a_name_says_the_address_that_has_its_control_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def two(host: Any, *given: Any, **named: Any) -> list[Any]:
        names = ("::1", "127.0.0.1") if host == "localhost" else (host,)
        return [found for name in names for found in resolve(name, *given, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    async with rig(answer_name, host="localhost") as r:
        assert r.url.startswith("http://127.0.0.1:"), "another program may have the port at ::1, and gets no key"
        assert (await (await r.client()).ask()).status == 200


async def test_a_hung_client_of_the_control_port_holds_up_no_announcement() -> None:
    async with rig(answer_name, api_key="key") as r:
        head = b"PUT /router/engines HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n"
        for sent in (b"", head, head + b"Content-Length: 99\r\n\r\n{") * 20:  # more than the strangers it keeps
            await (await r.control()).send(sent)
        stranger = RouterAdmin(r.url, "key")  # opens a connection of its own
        await stranger.announce(Membership(5, ()))
        assert (await r.admin.engines()).epoch == 5
        await stranger.close()


async def test_an_engine_gets_its_own_key_and_no_client_s() -> None:
    async with rig(answer_name, answer_name, policy="round-robin") as r:
        await r.announce([r.backends[0].entry(api_key="secret-of-e0"), r.backends[1].entry()])
        client = await r.client()
        for _ in range(2):
            await client.ask(headers="Authorization: Bearer mine\r\nX-API-Key: mine\r\n")
        assert [b.seen[0].header("authorization") for b in r.backends] == ["Bearer secret-of-e0", None]
        assert [b.seen[0].header("x-api-key") for b in r.backends] == [None, None]
        state = await client.ask("/router/engines", method="GET")
        assert b"secret-of-e0" not in state.body
        assert "secret-of-e0" not in repr(r.backends[0].entry(api_key="secret-of-e0"))
        for bad in ("", "a b", "a\r\nX: y", "é"):
            with pytest.raises(UserError, match="api_key"):
                await r.announce([r.backends[0].entry(api_key=bad)])


async def test_the_root_says_what_is_served() -> None:
    async with rig(answer_name) as r:
        answer = await (await r.client()).ask("/", method="GET")
        served = json.loads(answer.body)
        assert answer.status == 200
        assert "/v1/completions" in served["data"]
        assert "/router/engines" in served["router"]
        assert not r.backends[0].seen


async def test_epochs() -> None:
    async with rig() as r:
        first = (EngineEntry("a", "http://127.0.0.1:1"), EngineEntry("b", "http://127.0.0.1:2", 3, eligible=False))
        await r.admin.announce(Membership(5, first))
        await r.admin.announce(Membership(5, first))  # the same again
        await r.admin.announce(Membership(4, first))  # late, and nothing new
        for epoch in (5, 4):
            for other in (Membership(epoch, first[:1]), Membership(epoch, first, closed=True)):
                with pytest.raises(StateError, match=rf"epoch {epoch} is not newer than 5"):
                    await r.admin.announce(other)
        state = await r.admin.engines()
        assert (state.epoch, [(e.name, e.weight_version, e.eligible) for e in state.engines]) == (
            5,
            [("a", 0, True), ("b", 3, False)],
        )
        await r.admin.announce(Membership(6, ()))
        assert (await r.admin.engines()).engines == ()


async def test_an_engine_that_stays_keeps_its_connections_and_one_that_leaves_ends_its_work() -> None:
    go, slow = held()
    async with rig(slow, answer_name, policy="round-robin") as r:
        leaving, staying = r.backends
        client = await r.client()
        await client.send(request())
        await leaving.arrived.wait()
        await r.announce([staying.entry(weight_version=1)])
        assert [e.name for e in (await r.admin.engines()).engines] == ["e1"]
        other = await r.client()
        assert {(await other.ask()).body for _ in range(3)} == {b"e1"}
        go.set()
        assert (await client.receive()).body == b"e0"
        async with asyncio.timeout(60):
            await leaving.disconnected.wait()
        assert staying.connections == 1


def one_engine(**given: object) -> bytes:
    return json.dumps({"epoch": 9, "engines": [{"name": "a", "url": "http://a:1", **given}]}).encode()


TWICE = json.dumps({"epoch": 9, "engines": [{"name": "a", "url": f"http://a:{port}"} for port in (1, 2)]}).encode()
BAD_CALLS = [
    ("PUT", "/router/engines", b"{", 400, "Invalid JSON"),
    ("PUT", "/router/engines", b'{"epoch": "1", "engines": []}', 400, "epoch"),
    ("PUT", "/router/engines", b'{"epoch": -1, "engines": []}', 400, "epoch"),
    ("PUT", "/router/engines", b'{"epoch": %d, "engines": []}' % 2**64, 400, "epoch"),
    ("PUT", "/router/engines", b'{"epoch": 9, "engines": [], "closed": 1}', 400, "closed"),
    ("PUT", "/router/engines", one_engine(url="https://a:1"), 400, "http://host:port"),
    ("PUT", "/router/engines", one_engine(url="http://a:1/v1"), 400, "http://host:port"),
    ("PUT", "/router/engines", one_engine(url="http://a..b:1"), 400, "engines.0.url"),
    ("PUT", "/router/engines", one_engine(name="a b"), 400, "engines.0.name"),
    ("PUT", "/router/engines", one_engine(wv=1), 400, "wv"),
    ("PUT", "/router/engines", TWICE, 400, "body: two engines have the name 'a'; give each its own"),
    ("PUT", "/router/engines", one_engine(dp_rank=-1), 400, "engines.0.dp_rank"),
    ("PUT", "/router/engines", one_engine(weight_version=2**64), 400, "engines.0.weight_version"),
    ("PUT", "/router/engines", one_engine(dp_rank=2**64), 400, "engines.0.dp_rank"),
    ("POST", "/router/sessions/finish", b'{"session_id": ""}', 400, "session_id"),
    ("POST", "/router/engines", b"", 404, "POST /router/engines"),
    ("GET", "/router/nothing", b"", 404, "/router/nothing"),
    ("GET", "/v1/x", b"", 404, "/v1/x"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), BAD_CALLS)
async def test_bad_admin_calls_are_clear(method: str, path: str, body: bytes, status: int, message: str) -> None:
    async with rig(answer_name) as r:
        answer = await (await r.control()).ask(path, body, method=method)
        assert answer.status == status
        assert message in json.loads(answer.body)["error"]
        assert (await r.admin.engines()).epoch == 1
        assert r.backends[0].seen == []
        assert (await (await r.client()).ask()).status == 200


async def test_two_engines_of_one_name_or_url_are_refused() -> None:
    a = EngineEntry("a", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="name 'a'"):
        Membership(1, (a, EngineEntry("a", "http://127.0.0.1:2")))
    with pytest.raises(UserError, match=r"url and rank \('http://127\.0\.0\.1:1', None\)"):
        Membership(1, (a, EngineEntry("b", "http://127.0.0.1:1")))


async def test_the_key_is_asked_for_everywhere_but_on_health() -> None:
    async with rig(answer_name, api_key="secret") as r:
        client = await r.client()
        for headers in ("", "Authorization: Bearer wrong\r\n", "Authorization: secret\r\n"):
            for method, target in (
                ("POST", "/v1/x"),
                ("GET", "/router/engines"),
                ("GET", "/router/metrics"),
                ("POST", "/router/health"),
                ("GET", "/router/health/../engines"),
                ("OPTIONS", "/v1/x"),
            ):
                answer = await client.ask(target, method=method, headers=headers)
                assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
        assert r.backends[0].seen == []
        assert (await client.ask("/router/health", method="GET")).status == 200
        answer = await client.ask(headers="authorization: Bearer secret\r\n")
        assert answer.status == 200
        assert r.backends[0].seen[0].header("authorization") is None
        stranger = RouterAdmin(r.url)
        await stranger._call("GET", "/router/health")
        with pytest.raises(EngineHTTPError, match="the key is missing") as caught:
            await stranger.engines()
        assert caught.value.status == 401
        await stranger.close()


async def test_a_wrong_key_with_a_large_body_still_gets_its_answer() -> None:
    async with (
        rig(answer_name, api_key="secret") as r,
        aiohttp.ClientSession() as session,
        session.post(r.url + "/v1/x", data=b"x" * 20_000_000) as response,
    ):
        assert response.status == 401


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/pauses", 404), ("/PAUSE", 404), ("/v1/completion", 404), ("/v1/completions/", 404), ("/v1/models/m", 404),
        ("/pause%0a", 400), ("/resume%0a", 400), ("/collective_rpc%0a", 400), ("/%70ause", 400), ("//pause", 400),
        ("/v1//completions", 400), ("/v1/./completions", 400), ("/v1/../pause", 400), ("/v1/completions/..", 400),
        ("/v1/completions;a", 400), ("/v1\\completions", 400), ("/v1/completions%20", 400), ("/pause%2f", 400),
        ("/v1/completions%3f", 400), ("/v1/comple%74ions", 400), ("/router%2fengines", 400),
    ],
)  # fmt: skip
async def test_only_data_paths_reach_an_engine(target: str, status: int) -> None:
    async with rig(answer_name) as r:
        client = await r.client()
        assert (await client.ask(target, body=b"{}")).status == status
        assert r.backends[0].seen == []


@pytest.mark.parametrize(
    "path", ["/pause", "/pause/", "//pause", "/../x", "/v1/../pause", "/penstock/info", "/metrics", "/v1/responses/r"]
)
def test_a_path_that_reaches_one_engine_only_is_no_data_path(path: str) -> None:
    with pytest.raises(ConfigError, match=f"'data_paths': cannot have '{re.escape(path)}': "):
        validate(RouterConfig, {"data_paths": f"/v1/x,{path}"})


def figures(text: str) -> dict[str, float]:
    """Every sample of a Prometheus text, by its name and label values."""
    families = list(text_string_to_metric_families(text))
    assert all(family.type in {"counter", "gauge", "histogram"} and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {" ".join([sample.name.removeprefix("penstock_router_"), *sample.labels.values()]): sample.value
             for sample in samples}  # fmt: skip
    assert len(found) == len(samples) == len([line for line in text.splitlines() if not line.startswith("#")])
    return found


async def test_metrics() -> None:
    async with rig(answer_name) as r:
        client = await r.client()
        await client.ask(body=b"12345")
        await client.ask("/router/nothing")
        await client.ask("/router", method="GET")
        await r.settled()
        answer = await client.ask("/router/metrics", method="GET")
        assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
        found = figures(answer.body.decode())
        expected = {
            "requests_total": 1,
            "answered_total": 1,
            "cancelled_total": 0,
            "broken_total": 0,
            "rejected_total not_found": 2,
            "held turn": 0,
            "held nowhere": 0,
            "engine_outstanding e0": 0,
            "engine_requests_total e0": 1,
            "engine_down e0": 0,
            "engine_breaker_openings_total e0": 0,
            "request_bytes_total": 5,
            "response_bytes_total": 2,
            "request_seconds_count": 1,
            "first_byte_seconds_bucket +Inf": 1,
            "hold_seconds_count": 0,
            "gate_seconds_count": 0,
        }
        assert {name: found.get(name) for name in expected} == expected
        assert 0 < found["first_byte_seconds_sum"] <= found["request_seconds_sum"] < 5
        assert figures((await client.ask("/metrics", method="GET")).body.decode()).keys() == found.keys()
        assert (await client.ask("/router/metrics", method="HEAD")).body == b""
        assert len(r.backends[0].seen) == 1
        scraped = await (await r.control()).ask("/metrics?all", method="GET")
        assert scraped.header("content-type") == answer.header("content-type")
        assert figures(scraped.body.decode()).keys() == found.keys()


def test_a_histogram_counts_each_value_once_up_to_and_with_its_bound() -> None:
    counted = Histogram()
    for value in (0.0, 0.001, 0.002, 0.0025, 2500.0, 9999.0):
        counted.observe(value)
    (first, second, *_, last, beyond, count, total) = histogram("x", "What.", counted).samples
    assert [(s.labels["le"], s.value) for s in (first, second, last, beyond)] == [
        ("0.001", 2), ("0.0025", 4), ("2500", 5), ("+Inf", 6),
    ]  # fmt: skip
    assert (total.value, count.value) == (pytest.approx(12499.0055), 6)
