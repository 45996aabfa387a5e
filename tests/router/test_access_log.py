"""One JSON line a request, which finds it again in traces; trace context itself passes through untouched."""

from __future__ import annotations

import json
import logging

import pytest
from router_rig import Backend, RawClient, answer_name, request

from patience import eventually
from penstock.router.memory import Membership
from penstock.router.server import Router
from penstock.settings import RouterConfig

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_line_names_trace_session_group_and_engine(caplog: pytest.LogCaptureFixture) -> None:
    backend = await Backend(answer_name, "e0").start()
    router = Router(RouterConfig(access_log=True, data_paths="/v1/x"))
    await router.start()
    try:
        router.dispatcher.announce(Membership(1, (backend.entry(),)))
        client = await RawClient.connect(router.url)
        with caplog.at_level(logging.INFO, "penstock.router.access"):
            context = f"Traceparent: 00-{TRACE.upper()}-00f067aa0ba902b7-01\r\ntracestate: a=1,b=2\r\n"
            await client.ask("/v1/x?y", b"body", f"X-Session-ID: s\r\nX-Group-ID: g\r\n{context}")
            router.dispatcher.gate.set(closed=True)
            await client.send(request("/v1/x", headers="traceparent: not-one\r\n"))
            await eventually(lambda: len(router.dispatcher.gate) == 1)
            router.dispatcher.gate.set(closed=False)
            await client.receive()
        client.close()
    finally:
        await router.close()
        await backend.stop()
    first, second = (json.loads(record.message) for record in caplog.records)
    assert (first["trace"], first["session"], first["group"], first["engine"]) == (TRACE, "s", "g", "e0")
    assert (first["method"], first["target"], first["status"], first["outcome"]) == ("POST", "/v1/x?y", 200, "ok")
    assert (first["bytes_in"], first["bytes_out"]) == (4, 2)
    assert 0 <= first["hold_seconds"] <= first["seconds"] < 10
    assert first["gate_seconds"] == 0 < second["gate_seconds"] <= second["seconds"]
    assert (second["trace"], second["session"], second["group"]) == (None, None, None)
    assert backend.seen[0].header("traceparent") == f"00-{TRACE.upper()}-00f067aa0ba902b7-01"
    assert backend.seen[0].header("tracestate") == "a=1,b=2"
