"""Complaint 8: asynchronous training on older tokens as if they were new, without a word: miles #1829."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config import load_config
from penstock.errors import ConfigError
from penstock.train.losses import CORRECTIONS, POLICY_LOSSES, Limits, LossTerms

DEMO = Path(__file__).parents[2] / "examples" / "DEMO.yaml"


def test_an_asynchronous_run_without_a_correction_does_not_start() -> None:
    with pytest.raises(ConfigError, match="trains on older tokens as if they were new; choose tis, mis, icepop"):
        load_config(DEMO, ["train.correction=none", "train.max_staleness=1"])
    assert load_config(DEMO, ["train.correction=none", "train.max_staleness=0"]).train.correction == "none"
    assert load_config(DEMO, []).train.correction != "none"


BOUNDS = ["importance_cap=.inf", "importance_cap=1e30", "ratio_band=[0.5,.inf]", "clip_high=.inf"]


@pytest.mark.parametrize("wrong", [*BOUNDS, "learning_rate=.inf", "weight_decay=.nan", "adam_betas=[1.5,0.9]"])
def test_bounds_that_cut_no_ratio_and_numbers_that_no_optimiser_can_use_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.{wrong.partition('=')[0]}.*, got"):
        load_config(DEMO, [f"train.{wrong}"])


@pytest.mark.parametrize(
    ("correction", "made", "now", "most"),
    [
        # Log-probabilities of a bad token when it was made and now; what its gradient may weigh at most.
        ("tis", -7.0, -1.0, 2.0),
        ("mis", -7.0, -1.0, 0.0),
        ("icepop", -7.0, -1.0, 0.0),
        ("dppo", -0.5, -3.0, 0.0),
        ("sequence_mask", -0.5, -3.0, 0.0),
        ("none", -7.0, -1.0, 404.0),
    ],
)
def test_a_correction_bounds_what_a_stale_token_can_do(correction: str, made: float, now: float, most: float) -> None:
    """A bad token that became e^6 times likelier meanwhile weighs 403 times as much where nothing corrects it."""
    logprobs = torch.tensor([[now]], requires_grad=True)
    terms = LossTerms(logprobs, torch.tensor([[made]]), torch.tensor([[-1.0]]), torch.ones(1, 1))
    output = POLICY_LOSSES["dapo"](terms, Limits(correction=correction))
    output.loss.backward()
    assert logprobs.grad is not None
    assert 0.99 * most <= abs(float(logprobs.grad)) <= most
    dropped = most == 0
    assert output.denominator == (0 if dropped else 1), "what is dropped thins nothing out"


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_no_token_that_a_correction_keeps_outweighs_the_cap(correction: str) -> None:
    """Its sequence's other token moved as far the other way, so that the means show nothing."""
    logprobs = torch.tensor([[-1.0, -7.0]], requires_grad=True)
    terms = LossTerms(logprobs, torch.tensor([[-7.0, -1.0]]), torch.tensor([[-1.0]]), torch.ones(1, 2))
    POLICY_LOSSES["dapo"](terms, Limits(correction=correction)).loss.backward()
    assert logprobs.grad is not None
    most = 404.0 if correction == "none" else Limits().importance_cap
    assert abs(float(logprobs.grad[0, 0])) <= most + 1e-5


def test_every_correction_is_held_here() -> None:
    held = {"tis", "mis", "icepop", "dppo", "sequence_mask", "none"}
    assert set(CORRECTIONS) == held
