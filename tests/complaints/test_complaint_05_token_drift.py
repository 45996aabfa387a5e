"""Complaint 5: text goes back through the tokenizer between turns, and other tokens come out.

verl #6719 and #6921 (the newline after `<|im_end|>`), ms-swift #10012 and #10106, NeMo Gym #1787 and #1545,
sglang #26555.
"""

from __future__ import annotations

import json
from pathlib import Path

from agent_rig import Rig

from chat_model import chat_tokenizer

ODD = '<tool_call>\n{"name": "add", "arguments": {"a":  1,"on" : false}}\n</tool_call>'
"""White space that no JSON library writes; `false` must not become `False`."""


async def test_a_call_is_sent_on_as_it_was_sampled_whatever_the_harness_makes_of_it(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path))
    rig.engine.texts = [ODD, "ok"]
    message = await rig.ask("a")
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    rig.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "2"})
    await rig.ask(None)
    rig.kept.give_reward(1.0, None)
    (row,) = rig.trajectories()
    text = rig.tokenizer.decode([*row.prompt_ids, *row.response_ids], skip_special_tokens=False)
    assert f"{ODD}<|im_end|>\n<|im_start|>user" in text  # with the newline that the template writes there
    assert "False" not in text


async def test_tokens_that_their_own_text_would_not_give_are_kept(tmp_path: Path) -> None:
    """The engine spells a marker in single characters; its text, tokenized again, would be the marker."""
    rig = Rig(chat_tokenizer(tmp_path))
    spelled = [token for character in "<think>" for token in rig.tokenizer.encode_exact(character)]
    rig.engine.ids = [spelled]
    message = await rig.ask("a")
    assert message["content"] == "<think>"
    assert rig.tokenizer.encode_exact("<think>") != spelled
    await rig.ask("b")
    rig.kept.give_reward(1.0, None)
    (row,) = rig.trajectories()
    assert list(row.response_ids[: len(spelled)]) == spelled
