"""Complaint 4: thinking is stripped in later turns, so the trained context is not the one that the engine saw.

verl #6854 and #5576, ART #726, prime-rl #1334.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_rig import Rig

from chat_model import chat_tokenizer
from gateway_rig import THOUGHT


@pytest.mark.parametrize("policy", ["extend", "faithful"])
async def test_thinking_stays_or_its_loss_is_a_branch_and_every_context_is_the_engine_s(
    tmp_path: Path, policy: str
) -> None:
    """The template strips thinking from turns before the last question; the harness sends none back."""
    rig = Rig(chat_tokenizer(tmp_path), policy)
    rig.engine.texts = [f"{THOUGHT}first", f"{THOUGHT}second", "third"]
    for question in ("a", "b", "c"):
        await rig.ask(question)
    rig.kept.give_reward(1.0, None)
    rows = rig.trajectories()
    thoughts = [rig.tokenizer.decode(row.response_ids).count("let me see") for row in rows]
    assert thoughts == ([2] if policy == "extend" else [1, 1, 0])
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(made) for made in rig.engine.made)
