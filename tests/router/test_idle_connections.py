"""vLLM closes idle connections after 5 s; whoever keeps one longer now and then posts on a dead one."""

from __future__ import annotations

import asyncio

import pytest
from router_rig import Backend, Reader, Seen, Writer, reply, rig, says

from patience import WAIT_S
from penstock import http
from penstock.http import HttpTransport
from penstock.router import backend, dispatcher
from penstock.router.membership import Membership
from penstock.router.state import RouterAdmin
from penstock.sim.server import KEEP_ALIVE_S


async def test_every_client_takes_a_fresh_connection_before_an_engine_closes_an_idle_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(http.IDLE_CONNECTION_S, backend.IDLE_S) <= KEEP_ALIVE_S - 0.5
    monkeypatch.setattr(http, "IDLE_CONNECTION_S", 3.0)
    monkeypatch.setattr(backend, "IDLE_S", 3.0)
    monkeypatch.setattr(dispatcher, "IDLE_S", 3.0)

    async def control(backend: Backend, seen: Seen, reader: Reader, writer: Writer) -> None:  # noqa: ARG001
        writer.write(reply(b'{"control_ports": [%d]}' % backend.port))

    async with rig(*[says(reply(b"{}"))] * 2, control) as r:
        behind_router, transport_server, admin_server = r.backends
        await r.announce([behind_router.entry()])
        client = await r.client()
        transport = HttpTransport(f"http://127.0.0.1:{transport_server.port}")
        admin = RouterAdmin(f"http://127.0.0.1:{admin_server.port}")

        async def ask_all() -> list[int]:
            assert (await client.ask()).status == 200
            await transport.post("/pause", timeout_s=WAIT_S)
            await admin.announce(Membership(1, ()))
            return [backend.connections for backend in r.backends]

        assert await ask_all() == await ask_all() == [1, 1, 1], "they are kept at all"
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(backend.disconnected.wait() for backend in r.backends))
        assert await ask_all() == [2, 2, 2]
        await transport.close()
        await admin.close()
