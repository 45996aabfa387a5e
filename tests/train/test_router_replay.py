"""Router replay: the learner computes with the experts that the engine chose, laid beside the right tokens."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from nano_models import SHAPE, save_dense, save_moe, save_routed
from penstock.config import TrainConfig
from penstock.engine.experts import with_experts
from penstock.errors import ConfigError, EngineError, UserError
from penstock.train.interface import Datum
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.types import Sample, VersionSpan

PROMPT, TOKENS = 5, 60


def save_mixtral(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, tie_word_embeddings=False, **shape))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def engine_of(folder: Path, ids: list[int], noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs `[L]` and experts `[L, layers, 2]` of a model whose routers round otherwise, as an engine's do."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)

    def rounded(router: Any, _inputs: Any, output: Any) -> Any:
        logits = output[0] + noise * torch.randn(output[0].shape, generator=generator)
        experts = logits.topk(2, dim=-1).indices
        chosen.append(experts)
        weights = torch.softmax(output[0], dim=-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights, experts

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(rounded)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    return logprobs, torch.stack(chosen, dim=1)


def datum(ids: list[int], experts: Any) -> Datum:
    ones = [1.0] * (len(ids) - 1)
    return Datum(ids[:-1], ids[1:], ones, [0.0] * len(ones), ones, experts=experts)


def sequences(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 50, (TOKENS + i,), generator=generator).tolist() for i in range(count)]


def learner_of(folder: Path, **config: Any) -> LocalLearner:
    return LocalLearner(str(folder), TrainConfig(dtype="float32", **config), seed=0)


@pytest.mark.parametrize("save", [save_moe, save_mixtral])
def test_replay_closes_the_gap_that_other_experts_make(save: Any, tmp_path: Path) -> None:
    """With noise of 0.05 on router logits, a few of a hundred choices differ."""
    folder, rows = save(tmp_path), sequences(3)
    found = [engine_of(folder, ids, noise=0.05) for ids in rows]
    learner = learner_of(folder)

    def gap(experts: list[Any]) -> float:
        data = [datum(ids, e) for ids, e in zip(rows, experts, strict=True)]
        ours = learner.forward(None, LossSpec({}), data).logprobs
        return max(float((a - b).abs().max()) for a, (b, _) in zip(ours, found, strict=True))

    without, replayed = gap([None] * 3), gap([e[:-1] for _, e in found])
    assert replayed < 1e-4, (replayed, without)
    assert without > 1e-2, (replayed, without)
    shifted = gap([torch.roll(e[:-1], 1, 0) for _, e in found])
    assert shifted > 1e-2, "experts of the token beside"
    some = gap([found[0][1][:-1], None, None])
    assert some > 1e-2, "and what has none is routed by the learner itself"


def test_a_backward_pass_that_computes_anew_replays_too(tmp_path: Path) -> None:
    [ids], folder = sequences(1), save_moe(tmp_path)
    experts = engine_of(folder, ids, noise=0.5)[1][:-1]
    found = []
    for recompute in ("none", "full"):
        learner = learner_of(folder, recompute=recompute)
        learner.forward_backward(None, LossSpec({"cross_entropy": 1.0}), [datum(ids, experts)])
        found.append({n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.allclose(found[0][n], found[1][n], atol=1e-6) for n in found[0])
    assert any("mlp.gate" in n and g.abs().sum() > 0 for n, g in found[0].items()), "the router learns"


@pytest.mark.parametrize(
    ("save", "shape", "message"),
    [
        (save_dense, (2, 2), "cannot be replayed: the learner's model has no experts"),
        (save_routed, (2, 2), "has the routers Glm4Moe.*; known routers are Mixtral"),
        (save_moe, (3, 2), r"experts are \(3, 2\) .* the learner's model has \(2, 2\)"),
    ],
)
def test_experts_of_another_model_are_refused(save: Any, shape: tuple[int, int], message: str, tmp_path: Path) -> None:
    [ids] = sequences(1)
    given = datum(ids, torch.zeros(len(ids) - 1, *shape, dtype=torch.long))
    with pytest.raises(ConfigError, match=message):
        learner_of(save(tmp_path)).forward(None, LossSpec({}), [given])
    with pytest.raises(UserError, match="experts of 3 tokens and 59 input tokens"):
        datum(ids, torch.zeros(3, 2, 2))


def test_an_expert_that_the_model_lacks_is_refused_before_the_step(tmp_path: Path) -> None:
    [ids] = sequences(1)
    given = torch.tensor([0, 1]).repeat(len(ids) - 1, 2, 1)
    given[5, 1, 0] = 9
    with pytest.raises(ConfigError, match="reports the expert 9, and the learner's model has the experts 0 to 3"):
        learner_of(save_moe(tmp_path)).forward(None, LossSpec({}), [datum(ids, given)])


def text_of(array: Any) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def test_an_engines_rows_are_those_of_the_tokens_that_it_read() -> None:
    rows = np.arange(10 * 2 * 2, dtype=np.uint8).reshape(10, 2, 2)
    sample = Sample((5, 6, 7), "length", None, (VersionSpan(0, 0, 3),))
    assert np.array_equal(with_experts(sample, text_of(rows), 8).routed_experts, rows)
    assert np.array_equal(with_experts(sample, text_of(rows), 5).routed_experts, rows[:7])
    assert with_experts(sample, text_of(rows), 9).routed_experts is None, "a row is missing, and nobody knows which"
    rows[3] = 0  # as of tokens of which vLLM knows nothing
    rows[4, 1] = 7
    unknown = np.zeros((10, 2), dtype=bool)
    unknown[3], unknown[4, 1] = True, True
    found = with_experts(sample, text_of(rows), 8).routed_experts
    assert np.array_equal(found, np.where(unknown[..., None], -1, rows.astype(int)))
    with pytest.raises(EngineError, match="float64 of shape"):
        with_experts(sample, text_of(rows.astype(float)), 8)
    with pytest.raises(EngineError, match="routed experts of the engine"):
        with_experts(sample, "no base64", 8)
