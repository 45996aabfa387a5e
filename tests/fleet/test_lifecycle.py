"""The states of an engine: which changes are allowed, and that each is logged with its reason."""

from __future__ import annotations

import itertools
import logging

import pytest

from penstock.errors import StateError
from penstock.fleet.lifecycle import SUBSTATES, TRANSITIONS, Lifecycle, State, Substate

ROUTES = {
    "launching": ([], {"syncing", "dead"}),
    "syncing": (["syncing"], {"serving", "dead"}),
    "serving": (["syncing", "serving"], {"paused", "draining", "dead"}),
    "paused": (["syncing", "serving", "paused"], {"serving", "draining", "dead"}),
    "draining": (["syncing", "serving", "draining"], {"stopped", "dead"}),
    "stopped": (["syncing", "serving", "draining", "stopped"], set()),
    "dead": (["dead"], {"launching", "stopped"}),
}
"""The way into each state, and the states that follow: ARCHITECTURE.md's table, written a second time on purpose."""


def engine_in(state: str) -> Lifecycle:
    life = Lifecycle("e")
    for step in ROUTES[state][0]:
        life.to(State(step), "test")
    return life


@pytest.mark.parametrize(("old", "new"), list(itertools.product(ROUTES, ROUTES)))
def test_a_state_leads_only_into_those_of_the_table(old: str, new: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.fleet.lifecycle")
    life = engine_in(old)
    before = list(life.history)
    if new in ROUTES[old][1]:
        life.to(State(new), "why")
        assert (life.history[-1].old, life.history[-1].new, life.reason) == (old, new, "why")
        assert caplog.messages[-1] == f"engine e: {old} -> {new}: why"
        assert (caplog.records[-1].levelno == logging.WARNING) == (new == "dead")
    else:
        with pytest.raises(StateError, match=f"engine e cannot go from {old} to {new}"):
            life.to(State(new), "why")
        assert (life.state, life.history) == (old, before)


def test_the_table_names_every_state() -> None:
    assert {str(state) for state in State} == {str(state) for state in TRANSITIONS} == set(ROUTES)


@pytest.mark.parametrize(("state", "substate"), list(itertools.product(ROUTES, Substate)))
def test_a_state_has_its_own_substates_only(state: str, substate: Substate) -> None:
    life = engine_in(state)
    before = life.substate
    if substate in SUBSTATES.get(State(state), ()):
        life.stay(substate, "why")
        assert life.reason == "why"
        assert life.substate is substate or state == "dead"
    else:
        with pytest.raises(StateError, match=f"engine e: {state} has no substate {substate}"):
            life.stay(substate)
        assert life.substate is before


def test_a_dead_engine_restarts_or_is_final_and_a_change_of_state_ends_a_substate() -> None:
    life = engine_in("syncing")
    life.stay(Substate.AWAITING_WEIGHTS)
    life.may_restart = lambda: True
    life.to(State.DEAD, "killed")
    assert life.substate is Substate.RESTARTING
    life.restarts = False
    assert life.substate is Substate.FINAL
    life.to(State.LAUNCHING, "test")
    life.to(State.SYNCING, "test")
    assert life.substate is None
