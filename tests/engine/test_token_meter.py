"""Tokens lost by an update: steady rate minus tokens made, until the rate is back."""

from __future__ import annotations

import pytest

from penstock.control_types import TokenLoss
from penstock.plugin.steps import Steps
from penstock.plugin.token_meter import TokenMeter


class Engine:
    """Makes steps of 0.1 s on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = Steps(lambda: self.now)
        self.meter = TokenMeter(self.steps)

    def run(self, seconds: float, tokens: int = 10, in_flight: int = 10) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.steps.count(tokens, in_flight)

    def update(self, version: int = 1, *, silent: float = 0.5, running: int = 10) -> None:
        self.meter.begin(version, running)
        self.now += silent
        self.meter.resume()

    def loss(self, version: int = 1) -> TokenLoss:
        """TimeoutError: it is not known yet."""
        loss = self.meter.loss(version)
        assert loss is not None, "it was not measured"
        return loss.result(0)


def test_a_pause_alone_costs_its_time():
    engine = Engine()
    engine.run(5)
    engine.update()
    engine.run(0.9)
    with pytest.raises(TimeoutError):  # not known yet
        engine.loss()
    engine.run(0.2)
    assert engine.loss() == TokenLoss(
        tokens=pytest.approx(50), seconds=pytest.approx(0.5), rate=pytest.approx(100), back=True
    )


def test_a_step_is_looked_at_while_an_update_is_measured_and_counted_always():
    engine = Engine()
    engine.run(5)
    assert engine.steps.after == set()
    engine.update()
    assert len(engine.steps.after) == 1
    engine.run(2)
    assert engine.loss().tokens == pytest.approx(50)
    assert engine.steps.after == set()
    engine.run(1)
    engine.meter.begin(2, 10)
    assert len(engine.steps.after) == 1
    engine.meter.close()
    assert engine.steps.after == set()


def test_tokens_that_are_missing_until_the_rate_is_back_count_too():
    engine = Engine()
    engine.run(5)
    engine.update()
    engine.run(2, tokens=0)  # prompts are computed again
    engine.run(2, tokens=5)
    engine.run(3)
    loss = engine.loss()
    assert loss.back
    assert loss.tokens == pytest.approx(50 + 200 + 100, abs=25), "less what is left at four fifths of the rate"
    assert 4.0 <= loss.seconds <= 4.6


def test_with_fewer_requests_less_is_expected():
    """A batch that ends is no loss."""
    engine = Engine()
    engine.run(5)
    engine.update(silent=0.1)
    engine.run(0.5)
    engine.run(2, tokens=3, in_flight=3)
    loss = engine.loss()
    assert loss.tokens == pytest.approx(10, abs=1)
    engine.update(2, silent=0.0, running=3)
    engine.run(0.1, tokens=3, in_flight=0)
    ended = engine.loss(2)
    assert (ended.tokens, ended.back) == (pytest.approx(0, abs=1), True), "nothing is left to make tokens of"


def test_the_next_update_ends_a_measurement_and_has_its_steady_rate():
    engine = Engine()
    engine.run(5)
    engine.update()
    engine.run(2, tokens=0)
    engine.update(2)
    first = engine.loss()
    assert (first.tokens, first.back) == (pytest.approx(250), False)
    engine.run(2)
    assert engine.loss(2) == TokenLoss(
        tokens=pytest.approx(50), seconds=pytest.approx(0.5), rate=pytest.approx(100), back=True
    )


def test_an_update_that_is_sent_again_is_measured_once():
    engine = Engine()
    engine.run(5)
    engine.meter.begin(1, 10)
    engine.now += 0.5
    engine.update(silent=0.5)
    engine.run(2)
    loss = engine.loss()
    assert loss.tokens == pytest.approx(100)


def test_idle_time_and_pauses_are_no_part_of_the_steady_rate():
    engine = Engine()
    engine.run(1, in_flight=0)
    engine.now += 100
    engine.run(0.6)
    engine.update(silent=0.1)
    engine.run(2)
    loss = engine.loss()
    assert loss.rate == pytest.approx(100)
    engine.meter.close()
    engine.now += 100
    engine.meter.resume()
    engine.run(0.6)
    engine.update(2, silent=0.1)
    engine.run(2)
    loss = engine.loss(2)
    assert loss.rate == pytest.approx(100)


def test_an_idle_engine_loses_nothing_and_a_pause_ends_a_measurement():
    engine = Engine()
    engine.update(running=0)
    assert engine.loss() == TokenLoss(tokens=0.0, seconds=0.0, rate=0.0, back=True)
    engine.run(5)
    engine.update(2)
    engine.now += 0.5
    engine.meter.close()
    assert engine.loss(2) == TokenLoss(
        tokens=pytest.approx(100), seconds=pytest.approx(1), rate=pytest.approx(100), back=False
    )
    assert engine.meter.loss(7) is None, "it was not measured"
