"""Chat templates of other families: where messages end, tools' names and places, and ids of calls."""

from __future__ import annotations

from pathlib import Path

from chat_model import TEMPLATE, chat_tokenizer
from gateway_rig import Engine, Rig
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Environment, Task, Turn
from penstock.rollout.generator import GeneratorInput
from penstock.rollout.multi_turn import MultiTurnGenerator
from penstock.types import SamplingParams

CHAT = "/v1/chat/completions"
LATE_END = TEMPLATE.replace("</tool_call>{% endfor %}<|im_end|>", "</tool_call>{% endfor %}{{ '\\n' }}<|im_end|>")
"""As deepseek-coder's."""


async def test_a_line_before_the_end_of_a_message_ends_no_turn(tmp_path: Path) -> None:
    rig = Rig(chat_tokenizer(tmp_path, LATE_END))
    rig.engine.texts = ["one\ntwo\n", "three"]
    first = await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
    assert rig.gateway.policy == "extend"
    assert rig.engine.params[0].stop_token_ids == (2,)
    said = first["choices"][0]["message"]
    assert said["content"] == "one\ntwo\n"
    await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]})
    (row,) = await rig.rows()
    text = rig.tokenizer.decode(row["response_ids"], skip_special_tokens=False)
    assert text == "one\ntwo\n<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"


def test_a_sample_that_was_cut_off_gets_the_whole_end(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, LATE_END)
    suffix = ChatTemplate(tokenizer).suffix([{"role": "user", "content": "y"}], last_id=12)
    assert suffix is not None
    assert tokenizer.decode(suffix, skip_special_tokens=False).startswith("\n<|im_end|>\n<|im_start|>user\ny")


def test_a_template_that_ends_messages_by_a_text_stops_at_the_tokenizer_s_end_alone(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    template = ChatTemplate(chat_tokenizer(tmp_path, plain + "{% if add_generation_prompt %}assistant: {% endif %}"))
    assert template.end_ids == (2,)
    assert ChatTemplate(chat_tokenizer(tmp_path / "b", plain.replace("\n\n", "END"))).end_ids == (2,)


class Asks(Environment):
    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", "x")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [self.train_task(i) for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        return float(task.id == "t0" and response_text == "three")

    async def step(self, task: Task, responses: list[str]) -> Turn:
        return Turn("y" if task.prompt == "x" else "", done=len(responses) == 2)


async def test_an_environment_s_episode_is_not_ended_by_a_line(tmp_path: Path) -> None:
    engine = Engine(chat_tokenizer(tmp_path, LATE_END), ["one\ntwo\n", "three"])
    made = MultiTurnGenerator(engine, engine.tokenizer, Asks(), SamplingParams(max_tokens=99), 1)
    (played,) = (await made.generate(GeneratorInput([Asks().train_task(0)]))).trajectories
    assert [params.stop_token_ids for params in engine.params] == [(2,), (2,)]
    text = engine.tokenizer.decode(played.response_ids, skip_special_tokens=False)
    assert text == "one\ntwo\n<|im_end|>\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"
