from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import EnvironmentConfig
from penstock.errors import ConfigError, UserError
from penstock.rollout.environment import Environment, Task, Turn, describe_error, load_environment, split_of
from penstock.rollout.reasoning_gym_env import CHUNK, TRIES, ReasoningGymEnvironment

SORTER = {
    "dataset": "number_sorting",
    "compact": True,
    "min_numbers": 3,
    "max_numbers": 5,
    "min_value": 0,
    "max_value": 99,
    "min_decimals": 0,
    "max_decimals": 0,
}


def sorter(seed: int = 0, **options: object) -> ReasoningGymEnvironment:
    environment = load_environment(EnvironmentConfig(options=SORTER | options), seed)
    assert isinstance(environment, ReasoningGymEnvironment)
    return environment


class Echo(Environment):
    """An environment of one's own, as the docs show it."""

    def __init__(self, *, seed: int, word: str = "echo") -> None:
        self.seed = seed
        self.word = word

    def train_task(self, index: int) -> Task:
        return Task(f"echo/{index}", f"say {self.word} {index}")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [Task(f"held/{i}", f"say {self.word} -{i + 1}") for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        return float(response_text == task.prompt.removeprefix("say "))


class Broken(Echo):
    def __init__(self, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.word = {}["x"]


class Again(Echo):
    """Asks a second time."""

    async def step(self, task: Task, responses: list[str]) -> Turn | None:
        return Turn(f"again: {task.prompt}") if len(responses) < 2 else None


def test_split_is_stable_and_has_the_stated_shares():
    # Literal values: a change of the hash would silently move shipped warm-start prompts into the held-out set.
    assert [split_of(p) for p in ("<0 1 2=", "<1 1 2=", "<2 1 2=")] == ["train", "heldout", "warm_start"]
    counts = {"heldout": 0, "warm_start": 0, "train": 0}
    for i in range(10_000):
        counts[split_of(f"prompt {i}")] += 1
    assert 900 < counts["heldout"] < 1100
    assert 2800 < counts["warm_start"] < 3200


def test_streams_are_deterministic_and_independent_of_the_order_of_calls():
    forward = [sorter().train_task(i) for i in range(40)]
    env = sorter()
    assert [env.train_task(i) for i in reversed(range(40))] == forward[::-1]
    assert sorter(seed=1).train_task(0) != forward[0]
    far = 10 * CHUNK // TRIES + 3
    assert env.train_task(far) == sorter().train_task(far)
    assert len({t.prompt for t in forward}) == 40
    with pytest.raises(UserError, match="negative"):
        env.train_task(-1)


def test_heldout_is_disjoint_from_training_and_warm_start_of_every_seed():
    heldout = [t for seed in range(3) for t in sorter(seed).heldout_tasks(128)]
    seen = {sorter(seed).train_task(i).prompt for seed in (0, 5) for i in range(200)}
    warm = {sorter().warm_start_task(i).prompt for i in range(200)}
    assert {split_of(t.prompt) for t in heldout} == {"heldout"}
    assert {split_of(p) for p in seen} == {"train"}
    assert {split_of(p) for p in warm} == {"warm_start"}
    assert len({t.prompt for t in heldout[:128]}) == 128


def test_compact_sorting_is_scored_exactly():
    env = sorter()
    for i in range(50):
        task = env.train_task(i)
        sign, numbers = task.prompt[0], [int(n) for n in task.prompt[1:-1].split()]
        want = sorted(numbers, reverse=sign == ">")
        assert task.prompt[-1] == "="
        assert 3 <= len(numbers) <= 5
        assert env.reward(task, " ".join(map(str, want))) == 1.0
        off_by_one = [want[0] + (1 if sign == ">" else -1), *want[1:]]
        assert env.reward(task, " ".join(map(str, off_by_one))) == 0.0
        assert env.reward(task, "") == 0.0


def test_sorting_in_its_own_words_is_scored_exactly():
    env = sorter(compact=False)
    task = env.train_task(0)
    values = [float(v) for v in task.metadata["entry"]["metadata"]["sorted_numbers"]]
    assert "Sort these numbers" in task.prompt
    assert env.reward(task, task.metadata["answer"]) == 1.0
    assert env.reward(task, str(values)) == 1.0
    near = [values[0] + (0.5 if values[0] > values[-1] else -0.5), *values[1:]]
    assert env.reward(task, str(near)) == 0.0
    assert env._scorer.score_answer(str(near), task.metadata["entry"]) == 1.0  # what exactness guards against


@pytest.mark.parametrize("name", ["spell_backward", "word_ladder", "list_functions", "acre", "countdown"])
def test_other_datasets_by_name(name: str):
    env = load_environment(EnvironmentConfig(options={"dataset": name}), 3)
    task = env.train_task(7)
    assert env.reward(task, task.metadata["answer"]) == 1.0
    assert env.reward(task, "no") < 1.0


@given(text=st.text())
def test_no_text_makes_the_reward_fail(text: str):
    for env in ENVIRONMENTS:
        assert 0.0 <= env.reward(env.train_task(0), text) <= 1.0


async def test_an_environment_of_ones_own():
    env = load_environment(EnvironmentConfig(name=f"{__name__}:Echo", options={"word": "hi"}), 4)
    task = env.train_task(2)
    assert env.reward(task, "hi 2") == 1.0
    assert await env.step(task, ["hi 2"]) is None
    assert await sorter().step(sorter().train_task(0), ["1 2 3"]) is None


def test_an_environment_that_answers_responses_has_turns():
    assert load_environment(EnvironmentConfig(name=f"{__name__}:Again"), 0).has_turns()
    assert not sorter().has_turns()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "'module:Class'"),
        ("reasoning-gym", {}, "did you mean 'reasoning_gym'"),
        ("no_such_module:Env", {}, "cannot be imported: there is no module 'no_such_module'; the modules of /"),
        ("needs_module:X", {}, r"ModuleNotFoundError: No module named 'not_there' \(.*needs_module.py, line 1\)"),
        ("penstock.types:Nope", {}, "cannot be imported: there is no 'Nope' in it; it has: "),
        ("penstock.rollout.gsm8k:GSM8", {}, "did you mean 'GSM8K'"),
        ("penstock.types:Sample", {}, "not a subclass"),
        (f"{__name__}:Echo", {"wrod": "x"}, "no option 'wrod'; did you mean 'word'"),
        (
            f"{__name__}:Broken",
            {},
            r"built with environment.options {}: KeyError: 'x' \(.*test_environment.py, line",
        ),
        ("broken_module:X", {}, r"cannot be imported: NameError: .*broken_module.py, line 1\)"),
        ("unread_module:X", {}, r"cannot be imported: SyntaxError: .* \(/.*unread_module.py, line 1\)$"),
        ("reasoning_gym", {}, "^environment.options lacks dataset, which 'reasoning_gym' requires$"),
        ("reasoning_gym", {"dataset": "number_sortin", "compact": True}, "did you mean 'number_sorting'"),
        ("reasoning_gym", {"dataset": "number_sorting", "min_nmbers": 3}, "'min_nmbers'; did you mean 'min_numbers'"),
        ("reasoning_gym", {"dataset": "spell_backward", "zzz": 3}, "known: compact, .*max_word_len"),
        ("reasoning_gym", {"dataset": "number_sorting", "min_numbers": 9, "max_numbers": 3}, "number_sorting"),
        ("reasoning_gym", {"dataset": "chain_sum", "compact": True}, "compact"),
    ],
)
def test_bad_names_and_options_say_what_is_wrong(
    name: str, options: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "broken_module.py").write_text("nothing\n")
    (tmp_path / "needs_module.py").write_text("import not_there\n")
    (tmp_path / "unread_module.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_environment(EnvironmentConfig(name=name, options=options), 0)


def test_too_small_a_dataset_is_said_to_be_so():
    with pytest.raises(UserError, match="too few distinct prompts"):
        sorter(min_value=0, max_value=1, max_numbers=3).heldout_tasks(4)


ENVIRONMENTS = [sorter(), sorter(compact=False), ReasoningGymEnvironment(dataset="spell_backward", seed=0)]


def test_an_error_inside_a_library_names_the_line_that_called_it():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert "test_environment.py, line" in describe_error(caught.value)
