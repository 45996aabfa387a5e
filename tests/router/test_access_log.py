"""One JSON line a request, which finds it again in traces; trace context itself passes through untouched."""

from __future__ import annotations

import json
from pathlib import Path

from router_rig import answer_name, request, rig

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_line_names_trace_session_group_engine_and_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with rig(answer_name, process=True, log=log, access_log=True, max_hold_s=0.1) as r:
        client = await r.client()
        context = f"Traceparent: 00-{TRACE.upper()}-00f067aa0ba902b7-01\r\ntracestate: a=1,b=2\r\n"
        await client.ask("/v1/x?y", b"body", f"X-Session-ID: s\r\nX-Group-ID: g\r\n{context}")
        await r.gate(closed=True)
        await client.send(request("/v1/x", headers="traceparent: not-one\r\n"))
        await r.until_held(1)
        await r.gate(closed=False)
        await client.receive()
        await r.announce([])
        assert (await client.ask()).status == 503
    first, second, third = map(json.loads, log.read_text().splitlines())
    assert (first["trace"], first["session"], first["group"], first["engine"]) == (TRACE, "s", "g", "e0")
    assert (first["method"], first["target"], first["status"], first["outcome"]) == ("POST", "/v1/x?y", 200, "ok")
    assert (first["bytes_in"], first["bytes_out"]) == (4, 2)
    assert 0 <= first["hold_seconds"] <= first["seconds"]
    assert first["gate_seconds"] == 0 < second["gate_seconds"] <= second["seconds"]
    assert (second["trace"], second["session"], second["group"]) == (None, None, None)
    assert (third["status"], third["outcome"], third["engine"]) == (503, "held_too_long", None)
    assert third["hold_seconds"] >= 0.1
    assert r.backends[0].seen[0].header("traceparent") == f"00-{TRACE.upper()}-00f067aa0ba902b7-01"
    assert r.backends[0].seen[0].header("tracestate") == "a=1,b=2"
