"""Episodes of several turns in token space: R28, and complaints of token drift."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from char_tokenizer import save_char_tokenizer
from chat_model import TEMPLATE, chat_tokenizer
from http_engine import HTTPEngine
from penstock.errors import ConfigError, PenstockError
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Environment, Response, Task, Turn
from penstock.rollout.episodes import MultiTurnGenerator, TokenRow
from penstock.rollout.generator import GeneratorInput, Trajectory
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.types import Sample, SamplingParams, VersionSpan
from sim_verify import verify

CONFIG = SimConfig(vocab_size=98, eos_token_id=2, eos_share=0.2, tokens_per_second=20_000, max_model_len=1024)
PARAMS = SamplingParams(max_tokens=24, temperature=0.7)


class Repeats(Environment):
    """Answers `turns` times; the reward of a turn is its number, that of the episode 100."""

    def __init__(self, turns: int = 3, role: Any = "user") -> None:
        self.turns = turns
        self.role = role

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", f"say {index}")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [Task(f"h{i}", f"show {i}") for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task, response_text
        return 100.0

    async def step(self, task: Task, responses: Sequence[str]) -> Turn | None:
        del task
        n = len(responses)
        return Turn(f"again {n}", reward=float(n), done=n == self.turns, role=self.role)


@pytest.fixture
async def client() -> AsyncIterator[HTTPEngine]:
    async with SimServer(CONFIG) as server:
        engine = await HTTPEngine.connect(server.url)
        yield engine
        await engine.teardown()


class Spy:
    """Notes the prompts and sessions that are sent."""

    def __init__(self, client: HTTPEngine) -> None:
        self.client = client
        self.sent: list[tuple[list[int], Any, SamplingParams]] = []

    async def sample(self, ids: Any, n: int, params: Any, session_id: Any = None) -> list[Sample]:
        self.sent.append((list(ids), session_id, params))
        return await self.client.sample(ids, n, params, session_id)


def turns_of(t: Trajectory) -> list[tuple[int, int]]:
    """Where the policy's tokens begin and end in the response."""
    edges = [0, *(i for i in range(1, len(t.loss_mask)) if t.loss_mask[i] != t.loss_mask[i - 1]), len(t.loss_mask)]
    return [(a, b) for a, b in pairwise(edges) if t.loss_mask[a]]


def check(t: Trajectory, params: SamplingParams, seeds: Sequence[int] | None = None) -> None:
    """Every sampled token is the engine's in the context of the row."""
    for start, end in turns_of(t):
        prompt = [*t.prompt_ids, *t.response_ids[:start]]
        sample = Sample(
            t.response_ids[start:end],
            "stop" if t.response_ids[end - 1] == 2 else "length",
            t.logprobs[start:end],
            (VersionSpan(0, 0, end - start),),
        )
        assert verify(prompt, sample, model=CONFIG.model, params=params, seeds=seeds) == []
    assert all(p == 0.0 for p, m in zip(t.logprobs, t.loss_mask, strict=True) if not m)


async def test_a_turn_sends_the_tokens_that_the_turns_before_it_sampled(
    client: HTTPEngine, tokenizer: Tokenizer
) -> None:
    spy = Spy(client)
    generator = MultiTurnGenerator(spy, tokenizer, Repeats(), PARAMS, 8)
    output = await generator.generate(GeneratorInput([Repeats().train_task(i) for i in range(12)], num_samples=2))
    several = 0
    for t in output.trajectories:
        check(t, PARAMS)
        turns = turns_of(t)
        several += len(turns) > 1
        mine = [sent for sent, session, _ in spy.sent if tuple(sent[: len(t.prompt_ids)]) == t.prompt_ids]
        for start, _ in turns:
            assert [*t.prompt_ids, *t.response_ids[:start]] in mine
        for (_, end), (start, _) in pairwise(turns):
            between = tokenizer.decode(t.response_ids[end:start], skip_special_tokens=False)
            assert between.endswith("<|im_end|>\n<|im_start|>assistant\n")
            assert "<|im_start|>user\nagain" in between
        assert [end for end, _ in t.turn_rewards] == [end for _, end in turns]
        assert t.reward == 100.0 + sum(range(1, len(turns) + 1))
    assert several >= 6
    sessions = {session for _, session, _ in spy.sent}
    assert len(sessions) == 24
    assert None not in sessions


async def test_limits_of_turns_and_tokens_end_an_episode_as_length(client: HTTPEngine, tokenizer: Tokenizer) -> None:
    tasks = [Repeats().train_task(i) for i in range(8)]
    by_turns = MultiTurnGenerator(client, tokenizer, Repeats(99), PARAMS, 8, max_turns=2)
    for t in (await by_turns.generate(GeneratorInput(tasks))).trajectories:
        assert len(turns_of(t)) <= 2
        assert t.stop_reason == "length"
    by_tokens = MultiTurnGenerator(client, tokenizer, Repeats(99), PARAMS, 8, max_turns=99, max_tokens=150)
    for t in (await by_tokens.generate(GeneratorInput(tasks))).trajectories:
        assert len(t.response_ids) <= 150
        assert t.stop_reason == "length"
        assert t.loss_mask[-1] == 1  # nothing of the environment at the end


async def test_seeds_make_episodes_repeatable_and_their_turns_differ(client: HTTPEngine, tokenizer: Tokenizer) -> None:
    batch = GeneratorInput([Repeats().train_task(0)] * 2, num_samples=2, seeds=[5, 5], group_ids=["a", "b"])
    spy = Spy(client)
    output = await MultiTurnGenerator(spy, tokenizer, Repeats(), PARAMS, 4).generate(batch)
    ids = [t.response_ids for t in output.trajectories]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert len({params.seed for _, _, params in spy.sent}) > 2


async def test_a_stop_token_of_the_batch_is_no_part_of_an_answer(tokenizer: Tokenizer) -> None:
    answers: list[str] = []

    class Ends:
        async def sample(self, *_: Any) -> list[Sample]:
            return [Sample(tuple(tokenizer.encode_exact("ab")), "stop", (-1.0, -1.0), (VersionSpan(0, 0, 2),))]

    class Notes(Repeats):
        async def step(self, task: Task, responses: Sequence[Response]) -> Turn | None:
            del task
            answers.append(responses[-1].answer)
            return None

    params = replace(PARAMS, stop_token_ids=tuple(tokenizer.encode_exact("b")))
    batch = GeneratorInput([Task("t", "x")], sampling_params=params)
    await MultiTurnGenerator(Ends(), tokenizer, Notes(), PARAMS, 1).generate(batch)
    assert answers == ["a"]


async def test_an_environment_that_fails_is_named(client: HTTPEngine, tokenizer: Tokenizer) -> None:
    class Fails(Repeats):
        async def step(self, task: Task, responses: Sequence[str]) -> Turn | None:
            del task, responses
            raise KeyError("lost")

    with pytest.raises(PenstockError, match=r"step of task 't0' failed: KeyError: 'lost'"):
        await MultiTurnGenerator(client, tokenizer, Fails(), PARAMS, 4).generate(GeneratorInput([Task("t0", "x")]))


def test_a_template_that_cannot_be_extended_is_refused(tmp_path: Path) -> None:
    """It writes the number of messages into each, so earlier ones change with later ones."""
    template = TEMPLATE.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }}{{ messages | length }}")
    counting = chat_tokenizer(tmp_path, template)
    assert ChatTemplate(counting).faults()
    with pytest.raises(ConfigError, match="cannot be extended turn by turn"):
        MultiTurnGenerator(object(), counting, Repeats(), PARAMS, 1)  # pyright: ignore[reportArgumentType]


def test_the_suffix_of_a_plain_template_is_the_text_alone(tmp_path: Path) -> None:
    save_char_tokenizer(tmp_path, max_length=64)
    tokenizer = load_tokenizer(tmp_path)
    template = ChatTemplate(tokenizer)
    assert template.faults() == []
    assert template.suffix([{"role": "user", "content": "ab"}], last_id=2) == tokenizer.encode_exact("ab")


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text("ab<>\n {}", min_size=1)), min_size=1, max_size=4))
def test_a_suffix_is_what_the_template_writes_behind_the_message(
    tokenizer: Tokenizer, messages: list[tuple[str, str]]
) -> None:
    messages.sort(key=lambda message: message[0] == "user")  # results of tools come first
    new: list[dict[str, Any]] = [{"role": role, "content": text, "tool_call_id": "c"} for role, text in messages]
    called = new[0]["role"] == "tool"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    before: dict[str, Any] = {"role": "assistant", "content": "yes", **({"tool_calls": [call]} if called else {})}
    template = ChatTemplate(tokenizer)
    whole = template.render([{"role": "user", "content": "q"}, before, *new])
    suffix = template.suffix(new, last_id=-1)
    assert suffix is not None
    assert whole[-len(suffix) :] == suffix
    assert template.suffix(new, last_id=2) == suffix[1:]


def test_a_row_says_which_tokens_attend_to_kept_kv() -> None:
    row = TokenRow((1,))
    kept = Sample((5, 6), "stop", (-1.0, -1.0), (VersionSpan(0, 0, 1), VersionSpan(1, 1, 2, kv_kept=True)))
    row.add_sample(kept)
    row.add_environment((7,))
    whole = row.trajectory(reward=0.0, stop_reason="stop", group_id="g", turn_rewards=())
    assert whole.kv_kept == (False, True, False)


def test_a_row_has_the_experts_of_its_last_answer_which_are_of_all_tokens() -> None:
    """They were dropped without a word, and a run of several turns replayed nothing."""
    rows = [[[layer + token] for layer in range(2)] for token in range(6)]
    one, two = (
        Sample((5, 6), "stop", (-1.0, -1.0), (VersionSpan(0, 0, 2),), routed_experts=r) for r in (rows[:2], rows)
    )
    row, end = TokenRow((1,)), {"reward": 0.0, "stop_reason": "stop", "group_id": "g", "turn_rewards": ()}
    row.add_sample(one)
    row.add_environment((7, 8))
    assert row.trajectory(**end).routed_experts is None, "nothing is known of the environment's tokens"
    row.add_sample(two)
    assert row.trajectory(**end).routed_experts == rows


def test_tokens_of_the_environment_have_the_version_of_the_token_before_them() -> None:
    row = TokenRow((1,))
    row.add_environment((5,))
    row.add_sample(Sample((6, 7), "stop", (-1.0, -1.0), (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    row.add_environment((8, 9))
    assert row.trajectory(reward=0.0, stop_reason="stop", group_id="g", turn_rewards=()).versions == (0, 3, 4, 4, 4)


async def test_a_turn_that_is_cut_off_is_the_episodes_last(client: HTTPEngine, tokenizer: Tokenizer) -> None:
    environment = Repeats(5)
    made = MultiTurnGenerator(client, tokenizer, environment, SamplingParams(max_tokens=1), concurrency=4)
    output = await made.generate(GeneratorInput([environment.train_task(i) for i in range(8)]))
    cut = [t for t in output.trajectories if t.response_ids[-1] != 2]
    assert cut
    assert {(t.stop_reason, t.response_ids[t.turn_rewards[-1][0] - 1] != 2) for t in cut} == {("length", True)}
    for t in output.trajectories:
        assert all(t.response_ids[end - 1] == 2 for end, _ in t.turn_rewards[:-1])


async def test_every_turn_asks_for_the_adapter(client: HTTPEngine, tokenizer: Tokenizer) -> None:
    asked: list[str | None] = []

    class Asks(Spy):
        async def sample(self, *given: Any, adapter: str | None = None) -> list[Sample]:
            asked.append(adapter)
            return await super().sample(*given)

    await MultiTurnGenerator(Asks(client), tokenizer, Repeats(), PARAMS, 8, adapter="a").generate(
        GeneratorInput([Task("t0", "x")])
    )
    assert len(asked) > 1
    assert set(asked) == {"a"}
