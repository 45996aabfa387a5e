"""An engine that is given up while requests are in flight there: they go on elsewhere, or their clients learn of it."""

from __future__ import annotations

import asyncio

import pytest
from router_rig import RawClient, Rig, answer_name, held, request, rig, says, stays

from patience import eventually
from penstock.router.membership import Membership
from penstock.router.state import RouterAdmin

BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n"


async def sent_to_e0(r: Rig) -> RawClient:
    """A request that is in flight on e0, which alone is in the set."""
    await r.announce([r.backends[0].entry()])
    client = await r.client()
    await client.send(request())
    await r.backends[0].arrived.wait()
    return client


async def give_up_e0(r: Rig, cut: tuple[str, ...] = ("e0",)) -> None:
    await r.admin.announce(Membership(99, (r.backends[1].entry(),), cut=cut))


@pytest.mark.parametrize("options", [{}, {"process": True, "workers": 2}], ids=["one-process", "two-workers"])
async def test_a_request_without_an_answer_goes_to_another_engine(options) -> None:
    async with rig(stays, answer_name, **options) as r:
        client = await sent_to_e0(r)
        await give_up_e0(r)
        assert (await client.receive()).body == b"e1"
        await asyncio.wait_for(r.backends[0].disconnected.wait(), 60)


async def test_an_answer_that_has_begun_is_seen_to_break() -> None:
    async with rig(says(BEGUN, then=stays), answer_name) as r:
        client = await sent_to_e0(r)
        assert b"begun" in await client.reader.readuntil(b"begun")
        await give_up_e0(r)
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
        await eventually(lambda: r.backends[0].open == 0)
        assert not any(e.outstanding for e in (await r.admin.engines()).engines)


async def test_what_is_in_flight_where_nobody_said_so_comes_to_its_end() -> None:
    release, answer = held()
    async with rig(answer, answer) as r:
        client = await sent_to_e0(r)
        await give_up_e0(r, cut=("e7",))
        release.set()
        assert (await client.receive()).body == b"e0"


async def test_it_is_given_up_later_than_it_left() -> None:
    async with rig(stays, answer_name) as r:
        client = await sent_to_e0(r)
        await give_up_e0(r, cut=())
        second = RouterAdmin(r.url)
        await second.announce(Membership(100, (r.backends[1].entry(),), cut=("e0",)))
        await second.close()
        assert (await client.receive()).body == b"e1"
