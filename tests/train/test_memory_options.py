"""Recomputing, offloading and compiling save memory or time and change no gradient; bf16 computes over fp32 weights."""

from __future__ import annotations

import pytest
import torch
from random_trajectories import trajectories_of

from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.options import validate
from penstock.train.grpo import Trainee, datum_of
from penstock.train.interface import Outputs
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec

SPEC = LossSpec({"dapo": 1.0, "entropy": 0.1})


def measure(model: str, **options: object) -> tuple[Outputs, dict[str, torch.Tensor], int]:
    """Outputs and gradients of a few packed micro-batches, and how many products of matrices autograd kept."""
    config = TrainConfig(micro_batch_tokens=60, **options)
    learner = LocalLearner(model, config, seed=0)
    plain = Trainee(LocalLearner(model, TrainConfig(), seed=0), TrainConfig())
    data = [datum_of(t, 2 * t.reward - 1) for t in trajectories_of(plain)]
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = learner.forward_backward(None, SPEC, data)
    gradients = {name: p.grad for name, p in learner.policy.named_parameters() if p.grad is not None}
    return outputs, gradients, kept


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "full", "offload_activations": True},
        {"recompute": "selective", "offload_activations": True},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "recompute": "selective"}, marks=pytest.mark.slow),
    ],
)
def test_options_change_no_gradient(micro_model: str, options: dict[str, object]):
    want, want_gradients, want_kept = measure(micro_model)
    outputs, gradients, kept = measure(micro_model, **options)
    assert outputs.losses == pytest.approx(want.losses, rel=1e-5)
    torch.testing.assert_close(outputs.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, want_gradients, rtol=1e-4, atol=1e-5)
    if "compile" not in options:
        assert kept < want_kept / 2


def test_selective_recomputation_runs_attention_once(micro_model: str):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.attention = self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
            self.products += str(func) == "aten.mm.default"
            return func(*args, **(kwargs or {}))

    counts = {}
    for recompute in ("none", "selective", "full"):
        learner = LocalLearner(micro_model, TrainConfig(recompute=recompute), seed=0)
        data = [datum_of(t, 1.0) for t in trajectories_of(Trainee(learner, learner.config))]
        with Count() as count:
            learner.forward_backward(None, SPEC, data)
        counts[recompute] = count
    assert counts["selective"].attention == counts["none"].attention == counts["full"].attention / 2
    assert counts["none"].products < counts["selective"].products


def test_bf16_computes_over_weights_and_gradients_of_fp32(micro_model: str):
    want, want_gradients, _ = measure(micro_model)
    outputs, gradients, _ = measure(micro_model, dtype="bfloat16")
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert outputs.losses != want.losses
    assert outputs.losses == pytest.approx(want.losses, rel=0.05)
    flat = torch.cat([gradients[name].flatten() for name in want_gradients])
    want_flat = torch.cat([gradient.flatten() for gradient in want_gradients.values()])
    assert torch.nn.functional.cosine_similarity(flat, want_flat, dim=0) > 0.95


@pytest.mark.parametrize(
    "options", [{"offload_activations": True}, {"offload_activations": True, "recompute": "selective", "compile": True}]
)
def test_offloading_without_recomputed_inputs_is_refused(options: dict[str, object]):
    with pytest.raises(ConfigError, match="offload_activations keeps the inputs of recomputed layers"):
        validate(TrainConfig, options)
