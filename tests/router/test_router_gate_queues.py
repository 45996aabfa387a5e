"""The gate on its own: each event lets go what it concerns, in order, and looks at nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from patience import eventually
from penstock.router.gate import Gate, Wait, Waiter
from penstock.router.http import RefusalError, RequestHead
from penstock.router_settings import RouterConfig

NOWHERE, ROOM = Wait.NOWHERE, Wait.ROOM


class Request(Waiter):
    """Waits for what `where` says; counts how often it is tried."""

    def __init__(self, name: object, log: list[object], where: Callable[[], Wait | None], size: int = 0) -> None:
        self.request = RequestHead({})
        self.name, self.log, self.where, self.buffered = name, log, where, size
        self.tries = 0
        self.refusal = ""

    def refuse(self, refusal: RefusalError) -> None:
        self.refusal = refusal.code


def place(request: Request) -> Wait | None:
    request.tries += 1
    wait = request.where()
    if wait is None:
        request.log.append(request.name)
    return wait


def make_gate(**limits: float) -> Gate:
    return Gate(RouterConfig(**{"max_held": 100_000, **limits}), place)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The gate's clock: what is in it is the time."""
    now = [1000.0]
    monkeypatch.setattr("penstock.router.gate.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_of_ten_thousand_that_wait_for_room_an_event_tries_only_the_first() -> None:
    gate, log, free = make_gate(), [], 0

    def room() -> Wait | None:
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


@pytest.mark.parametrize("wait", [None, NOWHERE, ROOM])
async def test_ten_thousand_go_on_in_slices_and_in_order(wait: Wait | None) -> None:
    gate, log, closed = make_gate(), [], True
    gate.set(closed=wait is None)
    for i in range(10_000):
        gate.submit(Request(i, log, lambda: wait if closed else None))
    assert len(gate) == 10_000
    closed = False
    if wait is ROOM:
        gate.room()
    else:
        gate.set(closed=False)
    before = len(log)
    for _ in range(20):  # what the loop has to do besides, such as to accept, comes in between
        await turns(1)
        assert 0 < len(log) - before <= 64
        before = len(log)
    await eventually(lambda: not len(gate))
    assert log == list(range(10_000))


async def test_a_request_that_waits_for_room_and_then_for_an_engine_makes_way() -> None:
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


async def test_only_a_request_without_an_engine_is_given_up_and_not_for_a_pause(now: list[float]) -> None:
    gate, log = make_gate(max_hold_s=10), []
    requests = {wait: Request(wait, log, lambda wait=wait: wait) for wait in (ROOM, NOWHERE)}
    for request in requests.values():
        gate.submit(request)
    now[0] += 8
    gate.set(closed=True)
    now[0] += 3600
    gate.expire(now[0])
    gate.set(closed=False)  # the pause does not count
    gate.expire(now[0] + 1)
    assert [request.refusal for request in requests.values()] == ["", ""]
    gate.expire(now[0] + 3)
    assert [request.refusal for request in requests.values()] == ["", "held_too_long"]


async def test_patience_goes_on_where_it_was_when_an_engine_did_not_take_the_request(now: list[float]) -> None:
    gate, log, wait = make_gate(max_hold_s=10), [], NOWHERE
    request = Request(0, log, lambda: wait)
    gate.submit(request)
    now[0] += 8
    wait = None
    gate.recheck()
    assert log == [0]  # placed, and the engine refuses the connection
    wait = NOWHERE
    gate.submit(request)
    gate.expire(now[0] + 3)
    assert request.refusal == "held_too_long"


async def test_time_is_charged_to_what_was_waited_for(now: list[float]) -> None:
    gate, log, wait = make_gate(), [], ROOM
    gate.set(closed=True)
    request = Request("r", log, lambda: wait)
    gate.submit(request)
    now[0] += 1
    gate.set(closed=False)
    now[0] += 2
    wait = None
    gate.room()
    await turns(2)
    assert (log, request.gate_seconds, request.hold_seconds) == (["r"], 1, 2)


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


async def test_room_is_given_also_while_requests_come_as_fast_as_turns_are_taken() -> None:
    gate, log, free = make_gate(), [], False
    gate.submit(Request("waits", log, lambda: None if free else ROOM))
    gate.set(closed=True)
    for _ in range(100):
        gate.submit(Request("turn", log, lambda: None))
    gate.set(closed=False)
    free = True
    for _ in range(5):
        gate.room()
        for _ in range(64):
            gate.submit(Request("turn", log, lambda: None))
        await turns(1)
    assert gate.held_by()["turn"], "they still come as fast"
    assert log.count("waits") == 1
