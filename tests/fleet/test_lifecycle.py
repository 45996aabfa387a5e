from __future__ import annotations

import itertools
import logging

import pytest

from penstock.errors import StateError
from penstock.fleet.member import SUBSTATES, TRANSITIONS, Lifecycle, State, Substate

EDGES = {
    "launching": {"syncing", "dead"},
    "syncing": {"serving", "dead"},
    "serving": {"paused", "draining", "dead"},
    "paused": {"serving", "draining", "dead"},
    "draining": {"stopped", "dead"},
    "stopped": set(),
    "dead": {"launching", "stopped"},
}  # the drawing in ARCHITECTURE.md, written out a second time on purpose
ROUTE_TO = {
    "launching": (),
    "syncing": ("syncing",),
    "serving": ("syncing", "serving"),
    "paused": ("syncing", "serving", "paused"),
    "draining": ("syncing", "serving", "draining"),
    "stopped": ("syncing", "serving", "draining", "stopped"),
    "dead": ("dead",),
}


def engine_in(state: str) -> Lifecycle:
    life = Lifecycle("e")
    for step in ROUTE_TO[state]:
        life.to(State(step), "test")
    return life


@pytest.mark.parametrize(("old", "new"), list(itertools.product(EDGES, EDGES)))
def test_every_pair_of_states(old: str, new: str) -> None:
    life = engine_in(old)
    before = list(life.history)
    if new in EDGES[old]:
        life.to(State(new), "why")
        assert life.state == new
        assert (life.history[-1].old, life.history[-1].new, life.reason) == (old, new, "why")
    else:
        with pytest.raises(StateError, match=f"engine e cannot go from {old} to {new}"):
            life.to(State(new), "why")
        assert life.state == old
        assert life.history == before


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(State) == {State(s) for s in EDGES}


def test_into_serving_lead_only_confirmed_weights_and_a_pause() -> None:
    assert {old for old, new in TRANSITIONS.items() if State.SERVING in new} == {State.SYNCING, State.PAUSED}


def test_a_dead_engine_comes_back_only_through_syncing() -> None:
    reach = {State.DEAD}
    for _ in State:  # breadth first, never stepping on SYNCING
        reach |= {new for old in reach for new in TRANSITIONS[old] if new is not State.SYNCING}
    assert State.SERVING not in reach


def test_changes_are_logged_with_their_reason(caplog) -> None:
    with caplog.at_level(logging.INFO, "penstock.fleet.member"):
        life = engine_in("serving")
        life.to(State.DEAD, "its process exited with status -9")
    assert caplog.messages[-1] == "engine e: serving -> dead: its process exited with status -9"
    assert caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize(("state", "substate"), list(itertools.product(EDGES, Substate)))
def test_a_state_has_its_own_substates_only(state: str, substate: Substate) -> None:
    life = engine_in(state)
    before = life.substate
    assert before == SUBSTATES.get(State(state), (None,))[0] or state == "dead"
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
    life.restarts = True
    life.to(State.DEAD, "killed")
    assert life.substate is Substate.RESTARTING
    life.restarts = False
    assert life.substate is Substate.FINAL
    life.to(State.LAUNCHING, "test")
    life.to(State.SYNCING, "test")
    assert life.substate is None
