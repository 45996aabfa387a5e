"""Complaint 12: rewards are lost, or given to the wrong turn.

AReaL #1661, uni-agent #96.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_rig import Rig

from chat_model import chat_tokenizer
from penstock.errors import UserError


async def test_rewards_name_their_turn_and_hold_after_branches_and_retries(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path))
    rig.engine.texts = ["one", "two", "three"]
    await rig.ask("a")
    first = rig.nodes[-1]
    await rig.ask("b")
    second = rig.nodes[-1]
    rig.kept.give_reward(0.5, first.id)
    rig.messages = [rig.messages[0], rig.messages[1]]
    await rig.ask("elsewhere")  # a branch after the reward
    rig.kept.give_reward(2.0, None)
    for _ in range(2):  # a caller that was not sure
        rig.kept.give_reward(-1.0, second.id)
    rows = rig.trajectories()
    assert [row.reward for row in rows] == [-0.5, 2.5]
    assert [[reward for _, reward in row.turn_rewards] for row in rows] == [[0.5, -1.0], [0.5, 0.0]]
    ends = [end for end, _ in rows[0].turn_rewards]
    assert rig.tokenizer.decode(rows[0].response_ids[: ends[0]]) == "one"


async def test_a_row_without_a_reward_is_never_trained_on_as_if_it_had_one(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path))
    await rig.ask("a")
    with pytest.raises(UserError, match="has no reward"):
        rig.trajectories()
    with pytest.raises(UserError, match="no node 'other'"):
        rig.kept.give_reward(1.0, "other")
