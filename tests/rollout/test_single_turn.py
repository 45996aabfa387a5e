"""The single-turn generator, against a simulated engine over HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from char_tokenizer import save_char_tokenizer
from http_engine import HTTPEngine
from patience import WAIT_S
from penstock.errors import ConfigError, PenstockError, RequestError, UserError
from penstock.rollout.environment import Environment, Task
from penstock.rollout.episodes import Places, SingleTurnGenerator
from penstock.rollout.generator import GeneratorInput
from penstock.rollout.tokenizer import load_tokenizer
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.sim.tokens import decode, encode
from penstock.types import Sample, SamplingParams, VersionSpan
from sim_verify import verify

CONFIG = SimConfig(vocab_size=96, eos_share=0.1, tokens_per_second=20_000, max_model_len=64, kv_blocks=256)
PARAMS = SamplingParams(max_tokens=12, temperature=0.7)


class Characters:
    eos_token_id = 0

    def encode(self, words: str) -> list[int]:
        return encode(words, CONFIG.vocab_size)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(token_ids, 0 if skip_special_tokens else -1)


class Lengths(Environment):
    """Rewards the length of the text, so that a reward says which response it belongs to."""

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", f"say {index}")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [Task(f"h{i}", f"show {i}") for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task
        return float(len(response_text))


@pytest.fixture
async def server() -> AsyncIterator[SimServer]:
    async with SimServer(CONFIG) as server:
        yield server


@pytest.fixture
async def client(server: SimServer) -> AsyncIterator[HTTPEngine]:
    engine = await HTTPEngine.connect(server.url)
    yield engine
    await engine.teardown()


def generator_of(client: HTTPEngine, concurrency: int = 64, params: SamplingParams = PARAMS) -> SingleTurnGenerator:
    return SingleTurnGenerator(client, Characters(), Lengths(), params, concurrency)


def tasks(n: int) -> list[Task]:
    return [Lengths().train_task(i) for i in range(n)]


async def test_output_is_in_input_order_and_every_field_has_its_length(client: HTTPEngine) -> None:
    output = await generator_of(client).generate(GeneratorInput(tasks(5), num_samples=3))
    assert [t.group_id for t in output.trajectories] == [f"t{i}" for i in range(5) for _ in range(3)]
    for i, t in enumerate(output.trajectories):
        assert t.prompt_ids == tuple(Characters().encode(f"say {i // 3}"))
        assert {len(column) for column in (t.loss_mask, t.logprobs, t.versions)} == {len(t.response_ids)}
        assert t.reward == float(len(Characters().decode(t.response_ids)))
        assert set(t.loss_mask) == {1}
        assert t.stop_reason == ("stop" if t.response_ids[-1] == 0 else "length")
    assert output.metrics["reward_mean"] == pytest.approx(sum(t.reward for t in output.trajectories) / 15)
    assert output.metrics["truncated_share"] == sum(t.stop_reason == "length" for t in output.trajectories) / 15


async def test_tokens_are_those_of_the_prompt_the_seed_and_the_temperature(client: HTTPEngine) -> None:
    batch = GeneratorInput(tasks(4), num_samples=2, seeds=[10, 20, 30, 40])
    output = await generator_of(client).generate(batch)
    for i, t in enumerate(output.trajectories):
        sample = Sample(t.response_ids, t.stop_reason, t.logprobs, (VersionSpan(0, 0, len(t.response_ids)),))
        seed = 10 * (i // 2 + 1) + i % 2
        assert not verify(t.prompt_ids, sample, model=CONFIG.model, params=PARAMS, seeds=[seed])


async def test_the_engine_is_asked_for_tokens_alone_once_for_each_group(
    client: HTTPEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    request = client.data.http._request

    async def spy(timeout_s: float, method: str, url: str, **options: Any) -> object:
        paths.append(urlsplit(url).path)
        return await request(timeout_s, method, url, **options)

    monkeypatch.setattr(client.data.http, "_request", spy)
    await generator_of(client).generate(GeneratorInput(tasks(3), num_samples=8))
    assert paths == ["/inference/v1/generate"] * 3


async def test_sampling_parameters_of_the_batch_replace_the_generator_s(client: HTTPEngine) -> None:
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    batch = GeneratorInput(tasks(2), sampling_params=greedy, group_ids=["x", "y"])
    first, second = [await generator_of(client).generate(batch) for _ in range(2)]
    assert [t.response_ids for t in first.trajectories] == [t.response_ids for t in second.trajectories]
    assert {len(t.response_ids) for t in first.trajectories} <= {1, 2, 3}
    assert [t.group_id for t in first.trajectories] == ["x", "y"]


@pytest.mark.parametrize(("concurrency", "most"), [(8, 8), (11, 8), (1, 4), (64, 24)])
async def test_no_more_samples_are_in_flight_than_allowed_and_a_group_stays_whole(
    server: SimServer, client: HTTPEngine, concurrency: int, most: int
) -> None:
    seen: list[int] = []
    submit = server.engine.scheduler.add

    def watch(sequence: object) -> None:
        submit(sequence)  # pyright: ignore[reportArgumentType]
        seen.append(sum(len(r.sequences) for r in server.engine._requests.values()))

    server.engine.scheduler.add = watch  # pyright: ignore[reportAttributeAccessIssue]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    output = await generator_of(client, concurrency, params).generate(GeneratorInput(tasks(6), num_samples=4))
    assert len(output.trajectories) == 24
    assert max(seen) == most


async def test_an_error_ends_the_whole_batch_and_says_why(client: HTTPEngine) -> None:
    batch = GeneratorInput([*tasks(2), Task("long", "x" * 100)], num_samples=2)
    generator = generator_of(client, concurrency=2)
    with pytest.raises(PenstockError, match="64"):
        await generator.generate(batch)
    output = await generator.generate(GeneratorInput(tasks(1)))  # no place was lost
    assert len(output.trajectories) == 1


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), torch.tensor(1.0)])
async def test_a_reward_of_numpy_or_torch_is_a_float(
    client: HTTPEngine, monkeypatch: pytest.MonkeyPatch, reward: object
) -> None:
    monkeypatch.setattr(Lengths, "reward", lambda *_: reward)
    output = await generator_of(client).generate(GeneratorInput(tasks(1)))
    assert [(type(t.reward), t.reward) for t in output.trajectories] == [(float, 1.0)]


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1", torch.ones(2)])
async def test_a_reward_that_is_no_number_is_refused(
    client: HTTPEngine, monkeypatch: pytest.MonkeyPatch, reward: object
) -> None:
    monkeypatch.setattr(Lengths, "reward", lambda *_: reward)
    with pytest.raises(PenstockError, match="reward of task 't0' must be a finite number, got"):
        await generator_of(client).generate(GeneratorInput(tasks(1)))


async def test_a_cancelled_batch_gives_its_places_back(client: HTTPEngine) -> None:
    generator = generator_of(client, concurrency=2, params=SamplingParams(max_tokens=40, ignore_eos=True))
    work = asyncio.create_task(generator.generate(GeneratorInput(tasks(4), num_samples=2)))
    await asyncio.sleep(0.005)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    async with asyncio.timeout(WAIT_S):
        await generator.generate(GeneratorInput(tasks(2), num_samples=2))


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_places_are_never_oversold_and_given_in_order(total: int, wanted: list[int], data: st.DataObject) -> None:
    order: list[int] = []
    in_use = 0

    async def user(places: Places, index: int, pauses: int) -> None:
        nonlocal in_use
        async with places.take(wanted[index]):
            order.append(index)
            in_use += min(wanted[index], total)
            assert in_use <= total
            for _ in range(pauses):
                await asyncio.sleep(0)
            in_use -= min(wanted[index], total)

    async def run() -> None:
        places = Places(total)
        pauses = [data.draw(st.integers(0, 4)) for _ in wanted]
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            for i, n in enumerate(pauses):
                group.create_task(user(places, i, n))

    asyncio.run(run())
    assert order == sorted(order)
    assert in_use == 0


async def test_stop_strings_are_refused_because_rollouts_have_no_text(client: HTTPEngine) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        generator_of(client, params=SamplingParams(stop=("\n",)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": []}, "empty batch"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"seeds": [1]}, "seeds has 1 entries for 2 tasks"),
    ],
)
def test_a_malformed_batch_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GeneratorInput(**{"tasks": tasks(2), **values})  # pyright: ignore[reportArgumentType]


def test_a_tokenizer_folder_spells_text_exactly(tmp_path: Path) -> None:
    save_char_tokenizer(tmp_path, max_length=64)
    tokenizer = load_tokenizer(tmp_path)
    words = "<12 3 , 4 !="
    ids = tokenizer.encode(words)
    assert len(ids) == len(words)
    end = tokenizer.eos_token_id
    assert end is not None
    assert tokenizer.decode([*ids, end]) == words
    assert tokenizer.decode([*ids, end], skip_special_tokens=False) == words + "<eos>"


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in .*test_a_folder") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer in .*nowhere: there is no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: there is no such folder"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_cached_repository_without_settings_of_its_tokenizer_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    loaded: list[str] = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded.append)
    load_tokenizer("some/model")
    assert loaded == ["some/model"]


def test_a_name_that_the_hub_does_not_have_is_refused_without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    with pytest.raises(UserError, match="no model 'examples/nowhere': there is no such folder"):
        load_tokenizer("examples/nowhere")
