"""Complaint 7: trainer and engine disagree, on new architectures or right after a resume, and nobody is told.

prime-rl #2671, verl #5317 and #2738, slime #1695 (a gap right after resume).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from nano_models import state_of
from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.rollout.generator import Trajectory
from penstock.train.grpo import Trainee, datum_of
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.train.step_metrics import LogprobAlarm

SMALL = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPT, RESPONSE = (3, 1, 4), (1, 5, 9, 2)


def save(config: PretrainedConfig, folder: Path) -> str:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def told_by_an_engine(learner: LocalLearner, error: float = 0.0) -> Trajectory:
    """A trajectory with the logprobs that plain transformers gives for the weights that the learner would send."""
    model = AutoModelForCausalLM.from_config(learner.policy.model.config, attn_implementation="eager")
    model.load_state_dict(dict(learner.weights(None)), strict=False)
    logits = model.eval()(torch.tensor([PROMPT + RESPONSE])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(RESPONSE)[:, None]).squeeze(-1) + error
    size = len(RESPONSE)
    return Trajectory(
        PROMPT, RESPONSE, (1,) * size, tuple(logprobs.tolist()), (learner.versions[None],) * size, 1.0, "stop", "g"
    )


@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**SMALL, head_dim=8), Qwen2Config(**SMALL), LlamaConfig(**SMALL), MistralConfig(**SMALL)],
    ids=lambda config: config.model_type,
)
def test_an_architecture_computes_what_its_plain_model_does(config: PretrainedConfig, tmp_path: Path) -> None:
    learner = LocalLearner(save(config, tmp_path / "model"), TrainConfig(), seed=0)
    engine = told_by_an_engine(learner)
    found = learner.forward(None, LossSpec({}), [datum_of(engine, 0.0)]).logprobs[0][len(PROMPT) - 1 :]
    torch.testing.assert_close(found, torch.tensor(engine.logprobs), rtol=1e-4, atol=1e-4)


def test_an_architecture_that_the_learner_would_compute_wrongly_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(**SMALL, head_dim=8, final_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match="sets final_logit_softcapping, which the learner does not support"):
        LocalLearner(save(config, tmp_path / "model"), TrainConfig(), seed=0)


def test_there_is_no_gap_right_after_a_resume_and_an_alarm_where_there_is_one(tmp_path: Path) -> None:
    model = save(Qwen3Config(**SMALL, head_dim=8), tmp_path / "model")
    config = TrainConfig(learning_rate=1e-2)
    first = Trainee(LocalLearner(model, config, seed=0), config)
    for _ in range(3):
        first.step([told_by_an_engine(first.learner), told_by_an_engine(first.learner)])  # type: ignore[arg-type]
    resumed = Trainee(LocalLearner(model, config, seed=0), config)
    resumed.learner.load_state(None, *state_of(first.learner, None))
    figures = resumed.step([told_by_an_engine(resumed.learner)])  # type: ignore[arg-type]
    assert figures["logprob_diff_max_equal"] < 1e-4
    alarm = LogprobAlarm(config.logprob_alarm)
    assert alarm.warning(figures) is None
    wrong = resumed.step([told_by_an_engine(resumed.learner, error=-0.3)])  # type: ignore[arg-type]
    warning = alarm.warning(wrong)
    assert warning is not None
    assert "trainer and engine disagree by 0.3 nats a token at equal weights" in warning
