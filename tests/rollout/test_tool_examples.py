"""The environments with tools in `examples/tools`, played on scripted samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_model import chat_tokenizer
from gateway_rig import Engine
from penstock.rollout.episodes import MultiTurnGenerator
from penstock.rollout.generator import GeneratorInput
from penstock.types import SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples" / "tools"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def call(name: str, **arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def test_a_calculator_and_a_database_answer_calls(tmp_path: Path) -> None:
    from calculator import Calculator
    from sql import Sql

    tokenizer = chat_tokenizer(tmp_path)
    sums, book = Calculator(seed=0), Sql(seed=0)
    product, order = sums.train_task(3), book.train_task(3)
    city = order.id.partition("/")[2]
    query = f"select sum(amount) from orders where city = '{city}'"  # noqa: S608
    for environment, task, first, result in (
        (sums, product, call("calculate", expression=product.id), product.metadata["answer"]),
        (book, order, call("query", sql=query), f"[[{order.metadata['answer']}]]"),
    ):
        engine = Engine(tokenizer, [f"<think>\nhm\n</think>\n\n{first}\n{first}", f"It is {task.metadata['answer']}"])
        generator = MultiTurnGenerator(engine, tokenizer, environment, SamplingParams(max_tokens=400), 1)
        (t,) = (await generator.generate(GeneratorInput([task]))).trajectories
        assert t.reward == 1.0
        text = tokenizer.decode(t.response_ids)
        assert text.count(f"<tool_response>\n{result}\n</tool_response>") == 2
        assert environment.tools[0]["function"]["name"] in tokenizer.decode(t.prompt_ids)
        assert environment.heldout_tasks(5) == type(environment)(seed=9).heldout_tasks(5)


@pytest.mark.parametrize(
    ("module", "function", "arguments", "says"),
    [
        ("calculator", "evaluate", {"expression": "2*(3+4)-1"}, "13"),
        ("calculator", "evaluate", {"expression": "9**9**9"}, "error: only whole"),
        ("calculator", "evaluate", {"expression": "__import__('os')"}, "error: only whole"),
        ("calculator", "evaluate", {"expression": "(" * 150}, "error"),
        ("calculator", "evaluate", {}, "error"),
        ("sql", "run", {"sql": "select count(*) from orders"}, "[[1]]"),
        ("sql", "run", {"sql": "drop table orders"}, "error: attempt to write"),
        ("sql", "run", {"sql": "attach '/etc/passwd' as x"}, "error"),
        (
            "sql",
            "run",
            {"sql": "with recursive n(x) as (select 1 union all select x+1 from n) select max(x) from n"},
            "error: interrupted",
        ),
        ("sql", "run", {"sql": "select 1; select 2"}, "error"),
    ],
)
def test_what_a_policy_may_write_does_no_harm(module: str, function: str, arguments: Any, says: str) -> None:
    import importlib

    tool = getattr(importlib.import_module(module), function)
    more = ([("Bern", 1)],) if module == "sql" else ()
    assert tool(json.dumps(arguments), *more).startswith(says)


async def test_a_number_is_guessed_by_what_each_guess_is_answered(tmp_path: Path) -> None:
    from guess import Guess, task_of

    tokenizer = chat_tokenizer(tmp_path)
    for feedback, said in ((True, ["15", "nine", "20"]), (False, ["15", "16", "17"])):
        environment, engine = Guess(seed=0, feedback=feedback), Engine(tokenizer, list(said))
        generator = MultiTurnGenerator(engine, tokenizer, environment, SamplingParams(max_tokens=9), 1)
        (t,) = (await generator.generate(GeneratorInput([task_of(12, 26, 20)]))).trajectories
        assert (t.reward, len(t.turn_rewards), t.stop_reason) == (float(feedback), 3, "stop")
        answers = [tokenizer.decode(ids).count("+05") for ids in engine.seen]
        assert answers == ([0, 1, 1] if feedback else [0, 0, 0])


def test_ranges_of_held_out_numbers_are_never_trained_on() -> None:
    from guess import Guess

    heldout = {task.prompt for task in Guess(seed=0).heldout_tasks(400)}
    assert len(Guess(seed=0).heldout_tasks(400)) == len({task.id for task in Guess(seed=7).heldout_tasks(400)})
    assert heldout.isdisjoint(Guess(seed=1).train_task(i).prompt for i in range(500))
