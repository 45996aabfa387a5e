"""The gate in front of the engines: it holds the requests that cannot be placed yet, in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

from penstock.router.backend import Backend
from penstock.router.http import RefusalError, RequestHead
from penstock.router.membership import Engine
from penstock.router.placement import Share
from penstock.router_settings import RouterConfig

_SLICE = 64
"""Most requests placed in one turn of the event loop, so that ten thousand of them do not delay new connections."""


class Wait(Enum):
    """The event that a request waits for."""

    TURN = "turn"
    """The gate is closed, or earlier requests are still being placed."""
    ROOM = "room"
    """The policy admits no new session until load falls."""
    NOWHERE = "nowhere"
    """No engine that may serve it is up."""


class Waiter(Share):
    """A request that needs an engine and may wait at the gate."""

    request: RequestHead
    buffered = 0
    """Upper bound of the bytes that are kept of it."""
    held_bytes = 0
    """Its share of `Gate.held_bytes`."""
    hold_seconds = 0.0
    """Seconds waited for an engine or for room so far."""
    gate_seconds = 0.0
    """Seconds waited for its turn at the gate so far."""
    lost_on: frozenset[Engine] = frozenset()
    """Engines that took it and then closed the connection without an answer, or were dead."""
    excluded: tuple[Engine, ...] = ()
    """Engines of `lost_on` that do not get it again. The others may only have closed an idle connection."""
    wait: Wait | None = None
    since = 0.0
    """`time.monotonic()` at which this wait began."""
    nowhere_since = 0.0
    """`time.monotonic()` since which no engine has taken it; 0: it has not waited for one."""

    def placed(self, backend: Backend) -> None:
        """Take the chosen engine, where the request counts until `Dispatcher.done`."""
        raise NotImplementedError

    def refuse(self, refusal: RefusalError) -> None:
        """Refuse the request: it cannot wait, or not any longer."""
        raise NotImplementedError


class Gate:
    """Lets requests through in order of arrival, or holds them, without polling.

    No request fails because of a pause, however long: `max_hold_s` does not count it. A request does not fail either
    while the engines are full, since load will fall. `place` sends a request to an engine, or returns the event that it
    must wait for.
    """

    def __init__(self, config: RouterConfig, place: Callable[[Waiter], Wait | None]) -> None:
        self._config = config
        self._place = place
        self.closed = False
        self.busy = False
        """Whether it is closed or a request waits. Otherwise no event concerns it, and a request need not pass it."""
        self._closed_at = 0.0
        self.held_bytes = 0
        """Upper bound of the bytes kept of requests that had to wait or came in pieces, until their answers begin."""
        self._queues: dict[Wait, OrderedDict[Waiter, None]] = {wait: OrderedDict() for wait in Wait}
        self._turns = self._queues[Wait.TURN]
        self._room = self._queues[Wait.ROOM]
        """When load falls, only the first is tried; the next is tried once that one is placed."""
        self._filling = self._letting_go = False

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def crowded(self) -> bool:
        """Whether a new session must queue behind requests that wait for room."""
        return bool(self._room) and not self._filling

    def held_by(self) -> dict[str, int]:
        """Count the waiting requests by the value of `Wait`."""
        return {wait.value: len(queue) for wait, queue in self._queues.items()}

    def submit(self, request: Waiter) -> None:
        """Place a request, or let it wait behind those that came before it."""
        wait = Wait.TURN if self._turns or self.closed else self._place(request)
        if wait is not None:
            self.hold(request, wait)

    def hold(self, request: Waiter, wait: Wait) -> None:
        """Let a request wait. It is refused if too many wait, or too many of their bytes are kept."""
        try:
            if len(self) >= self._config.max_held:
                raise self._full()
            self.keep(request, request.buffered - request.held_bytes)
        except RefusalError as refusal:
            request.refuse(refusal)
        else:
            self._enter(request, wait)

    def keep(self, request: Waiter, size: int) -> None:
        """Count bytes that are kept of a request. RefusalError: 503, too many are kept."""
        if self.held_bytes + size > self._config.max_held_bytes:
            raise self._full()
        self.held_bytes += size
        request.held_bytes += size

    def release(self, request: Waiter) -> None:
        """Stop counting a request's bytes: its answer has begun, or it is over."""
        self.held_bytes -= request.held_bytes
        request.held_bytes = 0

    def _full(self) -> RefusalError:
        what = f"{len(self)} requests wait, and {self.held_bytes} bytes are kept"
        return RefusalError(503, "queue_full", f"{what}; retry later, or raise max_held or max_held_bytes")

    def set(self, *, closed: bool) -> None:
        now = time.monotonic()
        if closed and not self.closed:
            self._closed_at = now
        elif self.closed and not closed:
            for queue in self._queues.values():
                for request in queue:
                    if request.nowhere_since:
                        request.nowhere_since += now - max(self._closed_at, request.nowhere_since)
        self.closed = closed
        self.busy = closed or len(self) > 0
        if not closed:
            self.recheck()

    def recheck(self) -> None:
        """Try waiting requests again after a change of engines, those without one first."""
        for request in reversed(list(self._queues[Wait.NOWHERE])):
            self.discard(request)
            self._enter(request, Wait.TURN)
            self._turns.move_to_end(request, last=False)
        self._let_go()

    def room(self) -> None:
        """Soon try requests that wait for their turn or for room, since load fell; calls share one try."""
        if (self._turns or self._room) and not self._letting_go:
            self._letting_go = True
            asyncio.get_running_loop().call_soon(self._let_go)

    def expire(self, now: float) -> None:
        """Refuse requests that had no engine for too long; `now` is `time.monotonic()`."""
        longest_s = self._config.max_hold_s
        if self.closed:
            return
        late = [one for one in self._queues[Wait.NOWHERE] if one.nowhere_since <= now - longest_s]
        for request in late:
            version = request.request.min_weight_version
            needs = f" with weight version {version} or newer" if version else ""
            why = f"no engine{needs} could serve it for {longest_s:g} s; retry later or raise max_hold_s"
            self.discard(request)
            request.refuse(RefusalError(503, "held_too_long", why))

    def discard(self, request: Waiter) -> None:
        """Take a request out of its queue and add up its waiting time, if it waits."""
        if request.wait is None:
            return
        del self._queues[request.wait][request]
        self.busy = self.closed or len(self) > 0
        waited = time.monotonic() - request.since
        if request.wait is Wait.TURN:
            request.gate_seconds += waited
        else:
            request.hold_seconds += waited
        request.wait = None

    def _enter(self, request: Waiter, wait: Wait) -> None:
        request.wait, request.since = wait, time.monotonic()
        if wait is Wait.ROOM:
            request.nowhere_since = 0.0
        elif wait is Wait.NOWHERE:
            request.nowhere_since = request.nowhere_since or request.since
        self._queues[wait][request] = None
        self.busy = True

    def _let_go(self) -> None:
        """Place requests whose turn it is and those that wait for room, in order, until one has to wait on."""
        self._letting_go = more = False
        for queue in (self._turns, self._room):  # both, since new requests may come as fast as turns are taken
            self._filling = queue is self._room
            for _ in range(_SLICE):
                if not queue or self.closed:  # opening tries them
                    break
                request = next(iter(queue))
                self.discard(request)
                wait = self._place(request)
                if wait is not None:
                    self._enter(request, wait)
                if self._filling and wait is Wait.ROOM:  # no room for it, so none for those behind it
                    self._room.move_to_end(request, last=False)
                    break
            else:
                more = True
        self._filling = False
        if more:
            self.room()  # the rest of them follow in the next turn of the event loop
