"""Measurement of the tokens that a weight update costs one engine, for plugin and simulated engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.control_types import TokenLoss
from penstock.plugin.steps import Steps

if TYPE_CHECKING:
    from penstock.plugin.core import CoreControl

LOSS_S = 60.0
"""Longest time in seconds to measure an update's loss of tokens for a caller."""
BACK, BACK_S = 0.8, 1.0
"""The rate is back once it was at least share `BACK` of the steady one for `BACK_S` seconds."""
KEPT_LOSSES = 8
"""Most updates whose loss is remembered."""


@dataclass(slots=True)
class _Mark:
    """A moment: tokens made since the update began, and tokens expected at the steady rate."""

    time: float
    made: float
    expected: float


@dataclass(slots=True)
class _Update:
    """An update whose loss is being measured."""

    name: Hashable
    began: float
    rate: float
    running: int
    now: _Mark
    in_flight: int
    marks: deque[_Mark] = field(default_factory=deque[_Mark])
    """Marks of the last `BACK_S` seconds; empty until generation goes on."""


class TokenMeter:
    """Measures the tokens that each update costs, by the engine's steps.

    The loss is the steady rate times the time from the update's begin until the rate is back, minus the tokens made in
    that time. With fewer requests in flight than at the update, proportionally fewer tokens are expected. The rate is
    back at the start of the first `BACK_S` seconds with share `BACK` of the expected tokens. A measurement also ends
    with the next update, a pause, and the last request in flight; the loss so far counts.
    """

    def __init__(self, steps: Steps, idle: Iterable[Hashable] = ()) -> None:
        """`idle`: earlier updates, which cost nothing."""
        self._steps = steps
        self._open: _Update | None = None
        self._losses: dict[Hashable, Future[TokenLoss]] = {}
        for update in idle:
            self._losses[update] = Future()
            self._losses[update].set_result(TokenLoss(tokens=0.0, seconds=0.0, rate=0.0, back=True))

    def begin(self, name: Hashable, running: int) -> None:
        """Begin to measure the update `name`, with `running` requests making tokens."""
        now, rate, before = self._steps.clock(), 0.0, self._open
        if before is not None:
            if before.name == name:  # the same update is sent again
                return
            rate, running = before.rate, before.running
            self.close()
        elif running:
            rate = self._rate(now)
        self._losses[name] = Future()
        while len(self._losses) > KEPT_LOSSES:
            del self._losses[next(iter(self._losses))]
        self._open = _Update(name, now, rate, max(1, running), _Mark(now, 0.0, 0.0), self._steps.in_flight)
        self._steps.after.add(self._step)
        if not rate:
            self._end(self._open.now, back=True)

    def _rate(self, now: float) -> float:
        """Return the tokens per second of the last steps; 0.0 if none are known."""
        then, tokens = next(iter(self._steps.window), (now, 0))
        return (self._steps.tokens - tokens) / (now - then) if now > then else 0.0

    def resume(self) -> None:
        """Note that generation goes on after an update or a pause."""
        now = self._steps.clock()
        if (update := self._open) is None:
            self._steps.window.clear()
            return
        self._advance(update, now, 0)
        update.marks = deque((update.now,))

    def close(self) -> None:
        """End a measurement under way now, with the loss so far."""
        if (update := self._open) is not None:
            self._advance(update, self._steps.clock(), 0)
            self._end(update.now, back=False)

    def loss(self, name: Hashable) -> Future[TokenLoss] | None:
        """Return an update's loss, which may not be known yet; None: it was not measured."""
        return self._losses.get(name)

    def _step(self, now: float, tokens: int) -> None:
        if (update := self._open) is None:
            return
        self._advance(update, now, tokens)
        update.in_flight = self._steps.in_flight
        if update.marks:
            self._look(update)

    def _advance(self, update: _Update, now: float, tokens: int) -> None:
        before = update.now
        expected = update.rate * min(1.0, update.in_flight / update.running) * (now - before.time)
        update.now = _Mark(now, before.made + tokens, before.expected + expected)

    def _look(self, update: _Update) -> None:
        marks, now = update.marks, update.now
        marks.append(now)
        while len(marks) > 2 and marks[1].time <= now.time - BACK_S:  # noqa: PLR2004
            marks.popleft()
        first = marks[0]
        if not update.in_flight:
            self._end(now, back=True)
        elif now.time - first.time >= BACK_S and now.made - first.made >= BACK * (now.expected - first.expected):
            self._end(first, back=True)

    def _end(self, mark: _Mark, *, back: bool) -> None:
        update, self._open = self._open, None
        if update is None:
            return
        self._steps.after.discard(self._step)
        while self._steps.window and self._steps.window[0][0] < mark.time:
            self._steps.window.popleft()  # the steps of the update are not of the steady rate
        tokens = max(0.0, mark.expected - mark.made)
        loss = TokenLoss(tokens=tokens, seconds=mark.time - update.began, rate=update.rate, back=back)
        self._losses[update.name].set_result(loss)


def loss_of(control: CoreControl, body: Any) -> Future[Any]:
    """Answer a call with a version's cost once known, or its cost so far after `timeout_s`."""
    from penstock.plugin.core import field as field_of  # noqa: PLC0415 - a simulated engine has no core
    from penstock.plugin.core import settle  # noqa: PLC0415

    version, timeout_s = field_of(body, "version", int), field_of(body, "timeout_s", int, float)
    update = version if (adapter := body.get("adapter")) is None else (str(adapter), version)
    known = control.in_core(lambda: control.pausing.meter.loss(update))
    if not wait((known,), min(timeout_s, LOSS_S)).done:
        control.in_core(control.pausing.end_measurement)
    answer: Future[Any] = Future()
    known.add_done_callback(lambda _: settle(answer, lambda: (loss := known.result()) and asdict(loss)))
    return answer
