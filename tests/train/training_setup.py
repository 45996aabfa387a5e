"""What the tests of the trainer share: a nano model, an environment of letters, a run on a simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from http_engine import HTTPEngine
from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.engine.interface import Engine
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.rollout.environment import Environment, Task
from penstock.rollout.episodes import SingleTurnGenerator
from penstock.rollout.generator import Generator
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer
from penstock.sim.tokens import decode, encode
from penstock.train.grpo import Trainee
from penstock.train.learner import LocalLearner
from penstock.train.run import trainee_of
from penstock.train.trainer import train
from penstock.types import SamplingParams

VOCAB = 96
SIM = SimConfig(
    vocab_size=VOCAB, eos_share=0.1, tokens_per_second=2_000, max_model_len=64, kv_blocks=512, load_seconds=0.002
)


class Characters:
    """The simulated engine's own text: one token a character, 0 ends."""

    eos_token_id = 0

    def encode(self, words: str) -> list[int]:
        return encode(words, VOCAB)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(token_ids, 0 if skip_special_tokens else -1)


class Letters(Environment):
    """Solved where the first character of the response has an even code: half of what a random policy says."""

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def train_task(self, index: int) -> Task:
        return Task(f"train/{index}", f"t{index}=")

    def heldout_tasks(self, n: int) -> list[Task]:
        return [Task(f"heldout/{i}", f"h{i}=") for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        del task
        return float(bool(response_text) and ord(response_text[0]) % 2 == 0)


class Recorder(Reporter):
    """Keeps what it is told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_phase(self, name: str) -> None:
        self.events.append(("phase", name))

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self.events.append(("step", int(metrics["step"])))

    def on_update(self, report: UpdateReport) -> None:
        self.events.append(("update", report.version))

    def on_eval(self, name: str, accuracy: float) -> None:
        self.events.append(("eval", (name, accuracy)))

    def on_warning(self, text: str) -> None:
        self.events.append(("warning", text))

    def on_end(self, summary: Summary) -> None:
        self.events.append(("end", summary))


def save_nano_model(folder: Path) -> Path:
    """A Qwen3 of a few thousand weights, always the same."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def config_of(model: Path | str, **changes: Mapping[str, Any]) -> RunConfig:
    """A short run; `changes` by section."""
    sections: dict[str, dict[str, Any]] = {
        "engine": {"model": str(model)},
        "rollout": {"groups_per_batch": 4, "group_size": 4, "max_tokens": 12},
        "train": {"steps": 6, "checkpoint_every": 2, "max_staleness": 2, "threads": 1},
        "eval": {"size": 16},
    }
    for section, values in changes.items():
        sections[section] = {**sections.get(section, {}), **values}
    return RunConfig.model_validate({"name": "test", "seed": 3, **sections})


def learner_of(config: RunConfig) -> Trainee:
    """A fresh learner, as the command line builds it."""
    return trainee_of(config, LocalLearner(config.learner_model, config.train, seed=config.seed))


async def run_with(
    config: RunConfig,
    engine: Engine,
    trainee: Any,
    folder: RunFolder,
    *,
    generator: Callable[..., Generator] = SingleTurnGenerator,
    environment: Environment | None = None,
    reporter: Reporter | None = None,
    resume: bool = False,
) -> Summary:
    """One run on a given engine and with a given trainee."""
    environment = environment or Letters()
    params = SamplingParams(max_tokens=config.rollout.max_tokens, temperature=config.rollout.temperature)
    given = (engine, Characters(), environment, params, config.rollout.concurrency)
    return await train(
        config,
        engine,  # pyright: ignore[reportArgumentType]
        trainee=trainee,
        generator=generator(*given, adapter=trainee.served_adapter),
        environment=environment,
        folder=folder,
        reporter=reporter or Reporter(),
        resume=resume,
    )


async def run_on_sim(
    config: RunConfig, folder: RunFolder, *, sim: SimConfig = SIM, learner: Trainee | None = None, **options: Any
) -> Summary:
    """One run on a fresh simulated engine, over HTTP."""
    async with SimServer(sim) as server:
        client = await HTTPEngine.connect(server.url)
        try:
            return await run_with(config, client, learner or learner_of(config), folder, **options)
        finally:
            await client.teardown()


def what_counts(folder: RunFolder) -> list[dict[str, float]]:
    """The rows of a run without what depends on the time of day."""
    timed = ("seconds/", "update/", "tokens_per_second", "learner/seconds", "learner/tokens_per_second", "idle/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in folder.metrics()]


async def cut_off_after(step: int, config: RunConfig, folder: RunFolder) -> None:
    """Run on a simulated engine, and cancel the run as a step is recorded."""

    class CutOff(Reporter):
        def on_step(self, metrics: Mapping[str, float]) -> None:
            if metrics["step"] == step:
                work.cancel()

    work = asyncio.create_task(run_on_sim(config, folder, reporter=CutOff()))
    await asyncio.wait([work])
    assert work.cancelled()
