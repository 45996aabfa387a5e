"""The gate's lanes on their own: each event lets go whom it concerns, in order, and looks at nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from router_rig import eventually

from penstock.router.dispatcher import NOWHERE, Gate, Kind, Lane, Waiter
from penstock.router.http import RefusalError, RequestHead
from penstock.settings import RouterConfig

ROOM = Lane(Kind.ROOM, (0, None))


class Request(Waiter):
    """Waits where `where` says; counts how often it is tried."""

    def __init__(self, name: object, log: list[object], where: Callable[[], Lane | None], size: int = 0) -> None:
        super().__init__(RequestHead())
        self.name, self.log, self.where, self.buffered = name, log, where, size
        self.tries = 0
        self.refusal = ""

    def refuse(self, refusal: RefusalError) -> None:
        self.refusal = refusal.code


def place(request: Request) -> Lane | None:
    request.tries += 1
    lane = request.where()
    if lane is None:
        request.log.append(request.name)
    return lane


def make_gate(**limits: float) -> Gate:
    return Gate(RouterConfig(**{"max_held": 100_000, **limits}), place)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The gate's clock: what is in it is the time."""
    now = [1000.0]
    monkeypatch.setattr("penstock.router.dispatcher.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_of_ten_thousand_that_wait_for_room_an_event_tries_only_the_first() -> None:
    gate, log, free = make_gate(), [], 0

    def room() -> Lane | None:
        nonlocal free
        if not free:
            return ROOM
        free -= 1
        return None

    waiting = [Request(i, log, room) for i in range(10_000)]
    for request in waiting:
        gate.submit(request)
    assert len(gate) == gate.held_by()["room"] == 10_000
    for event in range(5):
        free = 1
        for _ in range(100):  # many of these in one turn of the loop are one
            gate.room()
        await turns(3)
        assert log == list(range(event + 1))
    assert sum(request.tries for request in waiting) == 10_000 + 5 + 5  # each event: one goes, the next does not
    assert next(iter(gate.crowded[ROOM])).name == 5


async def test_room_for_thousands_is_given_in_slices() -> None:
    gate, log, full = make_gate(), [], True
    for i in range(1000):
        gate.submit(Request(i, log, lambda: ROOM if full else None))
    full = False
    gate.room()
    await turns(1)
    assert 0 < len(log) < 200
    await eventually(lambda: not len(gate))
    assert log == list(range(1000))
    assert not gate.crowded


@pytest.mark.parametrize("lane", [None, NOWHERE])
async def test_ten_thousand_behind_a_gate_go_on_in_slices_and_in_order(lane: Lane | None) -> None:
    gate, log, closed = make_gate(), [], True
    gate.set(closed=lane is None)
    for i in range(10_000):
        gate.submit(Request(i, log, lambda: lane if closed else None))
    assert len(gate) == 10_000
    closed = False
    gate.set(closed=False)
    before = len(log)
    for _ in range(20):  # what the loop has to do besides, such as to accept, comes in between
        await turns(1)
        assert 0 < len(log) - before <= 64
        before = len(log)
    await eventually(lambda: not len(gate))
    assert log == list(range(10_000))


async def test_one_kind_of_room_does_not_hold_up_another() -> None:
    gate, log = make_gate(), []
    newer = Lane(Kind.ROOM, (7, None))
    gate.submit(Request("stuck", log, lambda: newer))
    full = True
    gate.submit(Request("goes", log, lambda: ROOM if full else None))
    full = False
    gate.room()
    await turns(2)
    assert log == ["goes"]
    assert gate.waits_for_room(newer)
    assert not gate.waits_for_room(ROOM)


async def test_lanes_that_stay_full_are_each_tried_once_for_one_event() -> None:
    gate, log = make_gate(), []
    lanes = [Lane(Kind.ROOM, (version, None)) for version in range(65)]  # more than a slice
    full = set(lanes)
    waiting = [Request(i, log, lambda lane=lane: lane if lane in full else None) for i, lane in enumerate(lanes)]
    for request in waiting:
        gate.submit(request)
    gate.room()
    await turns(50)
    assert [request.tries for request in waiting] == [2] * 65  # and no loop that spins
    full.clear()
    gate.room()
    await turns(10)
    assert log == list(range(65))
    assert not gate.crowded


async def test_load_that_falls_during_a_round_begins_another() -> None:
    gate, log = make_gate(), []
    lanes = [Lane(Kind.ROOM, (version, None)) for version in range(100)]
    full = set(lanes)
    for i, lane in enumerate(lanes):
        gate.submit(Request(i, log, lambda lane=lane: lane if lane in full else None))
    gate.room()
    await turns(1)
    full.discard(lanes[0])  # which has been tried
    gate.room()
    await turns(10)
    assert log == [0]


async def test_who_waits_for_room_and_then_for_an_engine_makes_way() -> None:
    gate, log, first = make_gate(), [], ROOM
    gate.submit(Request("first", log, lambda: first))
    full = True
    gate.submit(Request("second", log, lambda: ROOM if full else None))
    first, full = NOWHERE, False
    gate.room()
    await turns(2)
    assert (log, gate.held_by()["nowhere"]) == (["second"], 1)


async def test_closing_again_stops_the_release_and_keeps_the_order() -> None:
    gate, log = make_gate(), []
    gate.set(closed=True)
    for i in range(200):
        gate.submit(Request(i, log, lambda: None))
    gate.set(closed=False)
    gate.set(closed=True)
    await turns(10)
    assert len(log) < 200
    gate.set(closed=False)
    await eventually(lambda: not len(gate))
    assert log == list(range(200))


async def test_time_at_a_closed_gate_does_not_count(now: list[float]) -> None:
    gate, log = make_gate(max_hold_s=0.2), []
    before, during = Request(0, log, lambda: NOWHERE), Request(1, log, lambda: NOWHERE)
    gate.submit(before)
    now[0] += 0.1
    gate.set(closed=True)
    gate.submit(during)
    gate.expire(now[0] + 3600)
    now[0] += 0.3
    gate.set(closed=True)  # again: it was closed all the time
    gate.set(closed=False)
    gate.expire(now[0])
    assert (before.refusal, during.refusal) == ("", "")
    gate.expire(now[0] + 0.15)
    assert (before.refusal, during.refusal) == ("held_too_long", "")
    gate.expire(now[0] + 0.25)
    assert during.refusal == "held_too_long"


async def test_patience_goes_on_where_it_was_when_an_engine_did_not_take_the_request(now: list[float]) -> None:
    gate, log, lane = make_gate(max_hold_s=0.2), [], None
    gate.set(closed=True)
    request = Request(0, log, lambda: lane)
    gate.submit(request)
    now[0] += 0.3
    gate.set(closed=False)  # placed, and the engine refuses the connection
    assert (log, request.patience_used) == ([0], pytest.approx(0))
    lane = NOWHERE
    gate.submit(request)
    now[0] += 0.1
    gate.recheck()
    gate.discard(request)
    assert request.patience_used == pytest.approx(0.1)
    gate.submit(request)
    gate.expire(now[0] + 0.15)
    assert request.refusal == "held_too_long"


async def test_time_is_charged_to_what_was_waited_for(now: list[float]) -> None:
    gate, log, lane = make_gate(), [], ROOM
    gate.set(closed=True)
    request = Request("r", log, lambda: lane)
    gate.submit(request)
    now[0] += 1
    gate.set(closed=False)
    assert (request.gate_seconds, request.hold_seconds) == (1, 0)
    now[0] += 2
    lane = NOWHERE
    gate.room()
    await turns(2)
    assert (request.hold_seconds, request.patience_used) == (2, 0)
    gate.set(closed=True)
    now[0] += 4
    lane = None
    gate.set(closed=False)
    assert log == ["r"]
    assert (request.gate_seconds, request.hold_seconds, request.patience_used) == (5, 2, 0)


async def test_only_who_waits_for_an_engine_gives_up() -> None:
    gate, log = make_gate(max_hold_s=1), []
    requests = {lane: Request(lane, log, lambda lane=lane: lane) for lane in (ROOM, NOWHERE)}
    for request in requests.values():
        gate.submit(request)
    gate.expire(time.monotonic() + 0.9)
    assert len(gate) == 2
    gate.expire(time.monotonic() + 3600)
    assert [lane for lane, request in requests.items() if request.refusal] == [NOWHERE]


async def test_the_queue_is_bounded_by_number_and_by_bytes() -> None:
    gate, log = make_gate(max_held=2), []
    requests = [Request(i, log, lambda: NOWHERE) for i in range(3)]
    for request in requests:
        gate.submit(request)
    assert [request.refusal for request in requests] == ["", "", "queue_full"]
    gate = make_gate(max_held_bytes=100)
    requests = [Request(i, log, lambda: NOWHERE, size=40) for i in range(3)]
    for request in requests:
        gate.submit(request)
    assert [request.refusal for request in requests] == ["", "", "queue_full"]
    assert gate.held_bytes == 80
    for _ in range(2):  # as an exchange does at its end
        gate.discard(requests[0])
        gate.release(requests[0])
    assert (gate.held_bytes, len(gate)) == (40, 1)
    gate.submit(Request(3, log, lambda: NOWHERE, size=60))
    assert gate.held_bytes == 100


async def test_a_request_that_is_refused_when_it_is_tried_is_forgotten() -> None:
    gate, log = make_gate(), []

    def refused() -> Lane | None:
        if request.tries == 1:
            return NOWHERE
        gate.discard(request)  # as an exchange does when it is refused
        gate.release(request)
        return None

    request = Request("r", log, refused, size=10)
    gate.submit(request)
    gate.recheck()
    assert (len(gate), gate.held_bytes) == (0, 0)
    gate.submit(Request("next", log, lambda: None))
    assert log == ["r", "next"]
