"""Policy losses as pure functions of logprobs, advantages and a mask.

Axes: B sequences, T response positions (right-padded). Each loss is a sum over the sequences it is given, divided by
totals of the whole batch, so that the losses and gradients of micro-batches add up to those of the batch.

The policy that made the tokens (behaviour policy, mu) is the engine, with the logprobs it reported; the ratio is
r_t = pi(t) / mu(t). Importance weights are truncated at `importance_cap`: where the gradient carries the weight r, it
carries min(r, cap) instead (truncated importance sampling: Espeholt et al., IMPALA, arXiv:1802.01561; Yao et al. 2025,
"Your efficient RL framework secretly brings you off-policy RL training"). With clipping this acts where clipping does
not: on tokens of negative advantage that have become likelier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Logarithms of ratios are held within +-20 before exp, so that no ratio overflows in fp32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Clip range [1 - low, 1 + high] of the ratio, and where importance weights are truncated."""

    low: float = 0.2
    high: float = 0.28
    importance_cap: float = 2.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole batch: what sums over micro-batches are divided by."""

    sequences: int
    tokens: int
    """Response tokens under the loss mask."""
    max_tokens: int = 1
    """Dr. GRPO's constant: the generation budget in tokens."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Input of every loss.

    Attributes:
        logprobs_B_T: of the policy in training, with gradient.
        behaviour_B_T: of the policy that made the tokens, without.
        advantages_B: one for each sequence.
        mask_B_T: bool, true where the policy made the token. Values elsewhere do not matter.
    """

    logprobs_B_T: Tensor
    behaviour_B_T: Tensor
    advantages_B: Tensor
    mask_B_T: Tensor

    def log_ratio(self) -> Tensor:
        """Log of pi / mu, `[B, T]`, 0 outside the mask."""
        log_ratio_B_T = (self.logprobs_B_T - self.behaviour_B_T).masked_fill(~self.mask_B_T, 0.0)
        return log_ratio_B_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def lengths(self) -> Tensor:
        """Tokens under the mask of each sequence, `[B]`, at least 1."""
        return self.mask_B_T.sum(-1).clamp(min=1)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A loss, and its metrics as detached scalars; like the loss, those of micro-batches add up to the batch's.

    Metrics, as means over the response tokens of the batch: `clip_fraction` (tokens whose gradient the clip removed),
    `truncated_fraction` (tokens whose importance weight was cut), `ratio_mean`, `kl` (k3 estimate of KL(mu || pi),
    r - 1 - log r, http://joschu.net/blog/kl-approx.html), `entropy` (-log pi of the sampled tokens: an estimate of the
    policy's entropy where the tokens are its own).
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


Loss = Callable[[LossTerms, Limits, Totals], LossOutput]


def grpo(terms: LossTerms, limits: Limits, totals: Totals) -> LossOutput:
    """GRPO (Shao et al., DeepSeekMath, arXiv:2402.03300, eq. 3), without the KL term.

    1/G sum_i 1/|o_i| sum_t -min(r A_i, clip(r, 1 - low, 1 + high) A_i): mean over a sequence, then over sequences.
    """
    surrogate = _clipped(terms.log_ratio(), terms, limits)
    loss_B = (surrogate.loss_B_T * terms.mask_B_T).sum(-1) / terms.lengths()
    return _output(loss_B.sum() / totals.sequences, terms, surrogate, totals)


def dr_grpo(terms: LossTerms, limits: Limits, totals: Totals) -> LossOutput:
    """Dr. GRPO (Liu et al., arXiv:2503.20783): a constant in place of |o_i|, so that length carries no bias.

    1/(G max_tokens) sum_i sum_t -min(r A_i, clip(r) A_i). Its advantages are `group_mean`, without division by std.
    """
    surrogate = _clipped(terms.log_ratio(), terms, limits)
    total = (surrogate.loss_B_T * terms.mask_B_T).sum()
    return _output(total / (totals.sequences * totals.max_tokens), terms, surrogate, totals)


def dapo(terms: LossTerms, limits: Limits, totals: Totals) -> LossOutput:
    """DAPO (Yu et al., arXiv:2503.14476, eq. 8): every token weighs the same, and the clip is wider above than below.

    1/(sum_i |o_i|) sum_i sum_t -min(r A_i, clip(r, 1 - low, 1 + high) A_i).
    """
    surrogate = _clipped(terms.log_ratio(), terms, limits)
    total = (surrogate.loss_B_T * terms.mask_B_T).sum()
    return _output(total / totals.tokens, terms, surrogate, totals)


def gspo(terms: LossTerms, limits: Limits, totals: Totals) -> LossOutput:
    """GSPO (Zheng et al., arXiv:2507.18071, eq. 5): one ratio a sequence, s_i = (pi(o_i) / mu(o_i))^(1/|o_i|).

    1/G sum_i -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i). Its clip range is of the order of 3e-4.
    """
    log_ratio_B_1 = (terms.log_ratio().sum(-1) / terms.lengths()).unsqueeze(-1)
    surrogate = _clipped(log_ratio_B_1, terms, limits)
    total = (surrogate.loss_B_T * terms.mask_B_T.any(-1, keepdim=True)).sum()
    return _output(total / totals.sequences, terms, surrogate, totals)


def cispo(terms: LossTerms, limits: Limits, totals: Totals) -> LossOutput:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4): the importance weight is clipped, no token loses its gradient.

    1/(sum_i |o_i|) sum_i sum_t -sg(min(r, 1 + high)) A_i log pi. As in the paper, there is no lower bound; the upper
    one is `importance_cap` where that is less.
    """
    log_ratio_B_T = terms.log_ratio()
    bound = min(1 + limits.high, limits.importance_cap)
    ratio_B_T = log_ratio_B_T.detach().exp()
    weight_B_T = ratio_B_T.clamp(max=bound)
    loss_B_T = -weight_B_T * terms.advantages_B.unsqueeze(-1) * terms.logprobs_B_T.masked_fill(~terms.mask_B_T, 0.0)
    surrogate = _Surrogate(loss_B_T, clipped=torch.zeros_like(terms.mask_B_T), truncated=ratio_B_T > bound)
    return _output((loss_B_T * terms.mask_B_T).sum() / totals.tokens, terms, surrogate, totals)


LOSSES: Mapping[str, Loss] = {"grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}
"""By the name that `train.loss` has in the config."""


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """The loss of each token (or sequence: T = 1), where the clip removed its gradient, where its weight was cut."""

    loss_B_T: Tensor
    clipped: Tensor
    truncated: Tensor


def _clipped(log_ratio_B_T: Tensor, terms: LossTerms, limits: Limits) -> _Surrogate:
    """PPO's pessimistic clipped surrogate (arXiv:1707.06347, eq. 7) with truncated importance weights."""
    advantages_B_1 = terms.advantages_B.unsqueeze(-1)
    ratio_B_T = log_ratio_B_T.exp()
    free_B_T = ratio_B_T * advantages_B_1
    bound_B_T = ratio_B_T.clamp(1 - limits.low, 1 + limits.high) * advantages_B_1
    clipped = free_B_T > bound_B_T
    # A detached factor scales value and gradient alike: min(r, cap) is the weight of grad log pi.
    cut_B_T = (limits.importance_cap / ratio_B_T.detach()).clamp(max=1.0)
    loss_B_T = -torch.where(clipped, bound_B_T, cut_B_T * free_B_T)
    truncated = (cut_B_T < 1) & ~clipped & (advantages_B_1 != 0)
    return _Surrogate(loss_B_T, clipped, truncated)


def _output(loss: Tensor, terms: LossTerms, surrogate: _Surrogate, totals: Totals) -> LossOutput:
    with torch.no_grad():
        mask_B_T = terms.mask_B_T
        log_ratio_B_T = terms.log_ratio()
        ratio_B_T = log_ratio_B_T.exp()
        sums = {
            "clip_fraction": (surrogate.clipped & mask_B_T).sum(),
            "truncated_fraction": (surrogate.truncated & mask_B_T).sum(),
            "ratio_mean": (ratio_B_T * mask_B_T).sum(),
            "kl": ((ratio_B_T - 1 - log_ratio_B_T) * mask_B_T).sum(),
            "entropy": -terms.logprobs_B_T.masked_fill(~mask_B_T, 0.0).sum(),
        }
        return LossOutput(loss, {name: total / totals.tokens for name, total in sums.items()})
