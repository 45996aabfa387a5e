"""The whole loop learns: a nano model samples its own rollouts, in flight, and its logprobs are the learner's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from in_process_engine import InProcessEngine
from training_setup import config_of, learner_of, run_with
from transformers import AutoModelForCausalLM

from penstock.observe.run_folder import RunFolder
from penstock.types import SamplingParams

TEMPERATURE = 0.8


class NanoPolicy:
    """Samples from the model under the weights that the engine was last given."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.random = torch.Generator().manual_seed(5)
        self.engine = InProcessEngine(self.next_token)
        self.loaded: object = None

    @torch.no_grad()
    def next_token(self, ids: Sequence[int], params: SamplingParams) -> tuple[int, float]:
        if self.engine.tensors and self.loaded is not self.engine.tensors:
            self.model.load_state_dict(self.engine.tensors, strict=False)
            self.loaded = self.engine.tensors
        logits = self.model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
        if params.temperature == 0:
            return int(logits.argmax()), 0.0
        logprobs = (logits / params.temperature).log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=self.random))
        return token, float(logprobs[token])


async def test_reward_rises_and_logprobs_agree_at_equal_versions(model: Path, tmp_path: Path) -> None:
    config = config_of(
        model,
        rollout={"groups_per_batch": 6, "group_size": 8, "max_tokens": 3, "temperature": TEMPERATURE},
        train={"steps": 24, "learning_rate": 0.02, "max_staleness": 1, "checkpoint_every": 100},
        eval={"size": 16},
    )
    policy = NanoPolicy(model)
    folder = RunFolder.create(tmp_path / "run", config)
    summary = await run_with(config, policy.engine, learner_of(config), folder)
    rewards = [row["reward_mean"] for row in folder.metrics()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert summary.accuracy_before is not None
    assert summary.accuracy_after is not None
    assert summary.accuracy_after > summary.accuracy_before + 0.3
    assert summary.logprob_difference is not None
    assert 0 < summary.logprob_difference <= 1e-4
    assert summary.staleness.get(1, 0) > 0
    stale = [v for row in folder.metrics() for k, v in row.items() if k == "learner/logprob_diff_staleness/1"]
    assert max(stale) > 10 * summary.logprob_difference  # another version's logprobs are not the same
