"""Policy losses as pure functions of logprobs, advantages and masks; corrections.

Axes: B sequences, T places (right-padded). A loss returns a sum over its input, and the denominator that divides this
sum in the end. Both add up over micro-batches and ranks to the values of the batch.

The behaviour policy (mu) made the tokens: it is the engine, with the logprobs that it reported. The ratio is
r_t = pi(t) / mu(t). A correction decides which tokens are trained on, and with which weight. Denominators count the
tokens and sequences that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, UserError
from penstock.rollout.environment import import_named, user_code

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before exp, so that no ratio overflows in fp32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of losses and corrections; see `TrainConfig`.

    `low` and `high` are the widths of the ratio's clip range [1 - low, 1 + high]. `max_tokens` is the generation
    budget, the constant that `dr_grpo` divides by. `beta` is the factor of the quadratic penalty of `dro`.
    """

    low: float = 0.2
    high: float = 0.28
    correction: str = "tis"
    importance_cap: float = 2.0
    ratio_band: tuple[float, float] = (0.5, 5.0)
    probability_gap: float = 0.2
    sequence_gap: float = 0.2
    max_tokens: int = 1
    beta: float = 0.05

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise UserError(f"unknown correction {self.correction!r}; known: {', '.join(CORRECTIONS)}")
        if not self.ratio_band[0] <= 1 <= self.ratio_band[1]:
            raise UserError(f"ratio_band must be around 1, the ratio of an unchanged policy; got {self.ratio_band}")

    @property
    def cap(self) -> float:
        """Largest importance weight."""
        return math.inf if self.correction == "none" else self.importance_cap

    @property
    def replaces_clip(self) -> bool:
        """Whether the correction's mask replaces the loss's clip of the ratio."""
        return self.correction == "dppo"

    def kept(self, terms: LossTerms) -> Tensor:
        """Return the tokens that the correction keeps, bool `[B, T]`."""
        return CORRECTIONS[self.correction](terms, self)


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss to evaluate on data.

    Attributes:
        parts: names that `loss_named` takes, each with the factor of its sum in the gradient.
        temperature: temperature of sampling. It divides the logits before the engine's logprobs are computed.
        all_logprobs: also return logprobs of targets of weight 0.
    """

    parts: Mapping[str, float]
    limits: Limits = field(default_factory=Limits)
    temperature: float = 1.0
    all_logprobs: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"the temperature of sampling must be above 0, got {self.temperature}")

    @property
    def by_advantage(self) -> bool:
        """Whether targets of advantage 0 have no gradient."""
        return self.parts.keys() <= POLICY_LOSSES.keys() | TOKEN_LOSSES.keys() - {"dro"}


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Input of every loss.

    Attributes:
        logprobs_B_T: logprobs of the policy in training, with gradient.
        behaviour_B_T: logprobs of the policy that made the tokens, without gradient.
        advantages_B_T: advantage of each token, or of each sequence as `[B, 1]`.
        weights_B_T: factor of each token in the loss; 0: not trained on, and other values there are ignored.
        entropy_B_T: entropy of the policy in training, nats; for `entropy`.
        reference_B_T: logprobs of a reference policy; for `kl`.
        extra: additional input of `TOKEN_LOSSES`, by name: `sequence_ratio_mask`; and `clip_low_threshold` and
            `clip_high_threshold`, bounds of the ratio per token that replace those of `Limits`.
    """

    logprobs_B_T: Tensor
    behaviour_B_T: Tensor
    advantages_B_T: Tensor
    weights_B_T: Tensor
    entropy_B_T: Tensor | None = None
    reference_B_T: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    def mask(self) -> Tensor:
        """Return bool `[B, T]`, true where the weight is not 0."""
        return self.weights_B_T != 0

    def log_ratio(self) -> Tensor:
        """Return log(pi / mu), `[B, T]`, 0 outside the mask."""
        log_ratio_B_T = (self.logprobs_B_T - self.behaviour_B_T).masked_fill(~self.mask(), 0.0)
        return log_ratio_B_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def lengths(self) -> Tensor:
        """Return the tokens under the mask of each sequence, `[B]`, at least 1."""
        return self.mask().sum(-1).clamp(min=1)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Sums over the input of a loss. Sums of micro-batches add up to the batch's.

    Attributes:
        loss: sum with gradient, before division.
        denominator: divisor of the batch's loss: weights of kept tokens, kept sequences, or their budgets.
        metrics: detached sums over the tokens under the mask, for policy losses only: `clip_fraction` (tokens whose
            gradient the clip removed), `truncated_fraction` (importance weight was cut), `masked_fraction` (the
            correction dropped the token), `ratio_mean`, `logprob_gap_k1` (log mu - log pi), `kl`. This is the k3
            estimate of KL(mu || pi), r - 1 - log r, http://joschu.net/blog/kl-approx.html.
    """

    loss: Tensor
    denominator: Tensor
    metrics: Mapping[str, Tensor]


Loss = Callable[[LossTerms, Limits], LossOutput]

# --- corrections -----------------------------------------------------------------------------------------------------


def keep_all(terms: LossTerms, _: Limits) -> Tensor:
    """Keep every token. See `CORRECTIONS` for what `tis` adds to `none`."""
    return terms.mask()


def mis(terms: LossTerms, limits: Limits) -> Tensor:
    """Masked importance sampling. It drops sequences whose geometric mean of r is outside `ratio_band`."""
    mean_B_1 = (terms.log_ratio().sum(-1) / terms.lengths()).exp().unsqueeze(-1)
    return terms.mask() & _inside(mean_B_1, limits)


def icepop(terms: LossTerms, limits: Limits) -> Tensor:
    """IcePop (Ling Team 2025, "Small leak can sink a great ship"): drop tokens whose r is outside `ratio_band`."""
    return terms.mask() & _inside(terms.log_ratio().exp(), limits)


def dppo(terms: LossTerms, limits: Limits) -> Tensor:
    """DPPO (arXiv:2602.04879), total variation. It drops tokens that moved far and that A would move on.

    The condition is |pi - mu| > `probability_gap`, with pi > mu and A > 0 or pi < mu and A < 0. The mask replaces the
    clip of the ratio, which drops unlikely tokens that have hardly moved.
    """
    logprobs_B_T = terms.logprobs_B_T.detach().masked_fill(~terms.mask(), 0.0)
    gap_B_T = logprobs_B_T.exp() - terms.behaviour_B_T.masked_fill(~terms.mask(), 0.0).exp()
    farther_B_T = gap_B_T * terms.advantages_B_T.sign() > limits.probability_gap
    return terms.mask() & ~farther_B_T


def sequence_mask(terms: LossTerms, limits: Limits) -> Tensor:
    """DeepSeek-V3.2's off-policy sequence mask (arXiv:2512.02556, eq. 9).

    It drops tokens of negative advantage if their sequence's mean of log mu - log pi is above `sequence_gap`.
    """
    gap_B_1 = -terms.log_ratio().sum(-1, keepdim=True) / terms.lengths().unsqueeze(-1)
    return terms.mask() & ~((terms.advantages_B_T < 0) & (gap_B_1 > limits.sequence_gap))


CORRECTIONS: Mapping[str, Callable[[LossTerms, Limits], Tensor]] = {
    "tis": keep_all,
    "mis": mis,
    "icepop": icepop,
    "dppo": dppo,
    "sequence_mask": sequence_mask,
    "none": keep_all,
}
"""Corrections by their name in the config (`train.correction`). Each returns the tokens that it keeps, bool `[B, T]`.

All but `none`, which is right only for synchronous runs, also truncate importance weights: the gradient carries
min(r, cap) instead of r. That alone is `tis` (Espeholt et al., IMPALA, arXiv:1802.01561; Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"). With clipping, the cap acts where clipping does
not: on tokens of negative advantage that have become likelier.
"""
DROP_NOTHING = {"tis", "none"}
"""Corrections whose denominators do not depend on the policy."""


def _inside(ratio: Tensor, limits: Limits) -> Tensor:
    ratio = ratio.detach()
    return (ratio >= limits.ratio_band[0]) & (ratio <= limits.ratio_band[1])


# --- losses ----------------------------------------------------------------------------------------------------------


def grpo(terms: LossTerms, limits: Limits) -> LossOutput:
    """GRPO (Shao et al., DeepSeekMath, arXiv:2402.03300, eq. 3), without the KL term.

    1/G sum_i 1/|o_i| sum_t -min(r A_i, clip(r, 1 - low, 1 + high) A_i): mean over a sequence, then over sequences.
    """
    return _clipped(terms.log_ratio(), terms, limits).by_sequence()


def dr_grpo(terms: LossTerms, limits: Limits) -> LossOutput:
    """Dr. GRPO (Liu et al., arXiv:2503.20783): a constant replaces |o_i|, so that length causes no bias.

    1/(G max_tokens) sum_i sum_t -min(r A_i, clip(r) A_i). Its advantages are `group_mean`, without division by std.
    """
    surrogate = _clipped(terms.log_ratio(), terms, limits)
    return surrogate.output(surrogate.kept().sum(), surrogate.sequences() * limits.max_tokens)


def dapo(terms: LossTerms, limits: Limits) -> LossOutput:
    """DAPO (Yu et al., arXiv:2503.14476, eq. 8): every token weighs the same, and the clip is wider above than below.

    1/(sum_i |o_i|) sum_i sum_t -min(r A_i, clip(r, 1 - low, 1 + high) A_i).
    """
    return _clipped(terms.log_ratio(), terms, limits).by_token()


def gspo(terms: LossTerms, limits: Limits) -> LossOutput:
    """GSPO (Zheng et al., arXiv:2507.18071, eq. 5): one ratio per sequence, s_i = (pi(o_i) / mu(o_i))^(1/|o_i|).

    1/G sum_i -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i). Its clip range is of the order of 3e-4. If advantages
    differ within a sequence, this is the paper's GSPO-token (eq. 13); else the two are equal.
    """
    kept_B_T = limits.kept(terms)
    length_B = kept_B_T.sum(-1).clamp(min=1)
    log_ratio_B_T = terms.log_ratio()
    mean_B_1 = ((log_ratio_B_T * kept_B_T).sum(-1) / length_B).detach().unsqueeze(-1)
    # The value is the sequence's ratio, the gradient is each token's own.
    return _clipped(mean_B_1 + log_ratio_B_T - log_ratio_B_T.detach(), terms, limits).by_sequence()


def cispo(terms: LossTerms, limits: Limits) -> LossOutput:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4): the clip bounds the importance weight; no token loses its gradient.

    1/(sum_i |o_i|) sum_i sum_t -sg(min(r, 1 + high)) A_i log pi. As in the paper, there is no lower bound. The
    correction's cap is the upper bound if it is lower.
    """
    bound = limits.cap if limits.replaces_clip else min(1 + limits.high, limits.cap)
    ratio_B_T = terms.log_ratio().detach().exp()
    weight_B_T = ratio_B_T.clamp(max=bound)
    loss_B_T = -weight_B_T * terms.advantages_B_T * terms.logprobs_B_T.masked_fill(~terms.mask(), 0.0)
    clipped = torch.zeros_like(terms.mask())
    return _Surrogate(terms, loss_B_T, clipped, ratio_B_T > bound, limits.kept(terms)).by_token()


def cross_entropy(terms: LossTerms, _: Limits) -> LossOutput:
    """-sum_t w log pi, divided by the sum of weights: supervised learning of targets."""
    return _token_sum(-terms.logprobs_B_T, terms)


def kl(terms: LossTerms, limits: Limits) -> LossOutput:
    """k3 estimate of KL(pi || reference) on sampled tokens (DeepSeekMath, eq. 4), divided by sum of weights.

    mu made the tokens, so each is weighted by sg(min(r, importance_cap)). DeepSeek-V3.2 does so without the cap
    (arXiv:2512.02556). Without the weight, off-policy data give no estimate of a divergence of pi.

    Raises:
        UserError: the data have no reference logprobs.
    """
    if terms.reference_B_T is None:
        raise UserError("the loss part 'kl' needs data with reference logprobs")
    log_ratio_B_T = (terms.reference_B_T - terms.logprobs_B_T).masked_fill(~terms.mask(), 0.0)
    log_ratio_B_T = log_ratio_B_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_B_T = log_ratio_B_T.exp() - 1 - log_ratio_B_T
    ratio_B_T = terms.log_ratio().detach().exp().clamp(max=limits.importance_cap)
    return _token_sum(ratio_B_T * k3_B_T, terms)


def entropy(terms: LossTerms, _: Limits) -> LossOutput:
    """-sum_t w H(pi), divided by the sum of weights. A positive coefficient gives an entropy bonus."""
    if terms.entropy_B_T is None:
        raise UserError("the loss part 'entropy' needs the entropy of the policy's distributions")
    return _token_sum(-terms.entropy_B_T, terms)


POLICY_LOSSES: Mapping[str, Loss] = {"grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "cispo": cispo}
"""Policy losses by their name in the config (`train.loss`)."""

# Losses that are plain sums over tokens. The caller chooses weights and advantages, and nothing is corrected.


def importance_sampling(terms: LossTerms, _: Limits) -> LossOutput:
    """REINFORCE with importance weights: -sum_t w r A."""
    return _token_sum(-terms.log_ratio().exp() * terms.advantages_B_T, terms)


def ppo(terms: LossTerms, limits: Limits) -> LossOutput:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7): -sum_t w min(r A, clip(r) A)."""
    return _token_sum(_pessimistic(terms.log_ratio(), terms, limits), terms)


def gspo_token(terms: LossTerms, limits: Limits) -> LossOutput:
    """GSPO-token (arXiv:2507.18071, eq. 13) as a sum over tokens. Its own mask selects the sequence's ratio.

    Raises:
        UserError: the data have no `sequence_ratio_mask`.
    """
    if "sequence_ratio_mask" not in terms.extra:
        raise UserError("the loss 'gspo' needs data with sequence_ratio_mask, not 0 for the tokens that were sampled")
    mask_B_T = terms.extra["sequence_ratio_mask"] != 0
    gap_B_T = (terms.logprobs_B_T.detach() - terms.behaviour_B_T).masked_fill(~mask_B_T, 0.0)
    mean_B_1 = gap_B_T.sum(-1, keepdim=True) / mask_B_T.sum(-1, keepdim=True).clamp(min=1)
    log_ratio_B_T = mean_B_1 + terms.logprobs_B_T - terms.logprobs_B_T.detach()
    return _token_sum(_pessimistic(log_ratio_B_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), terms, limits), terms)


def cispo_token(terms: LossTerms, limits: Limits) -> LossOutput:
    """CISPO with a lower bound too: -sum_t w sg(clip(r)) A log pi."""
    low_B_T, high_B_T = _bounds(terms, limits)
    ratio_B_T = terms.log_ratio().detach().exp().clamp(low_B_T, high_B_T)
    return _token_sum(-ratio_B_T * terms.advantages_B_T * terms.logprobs_B_T, terms)


def dro(terms: LossTerms, limits: Limits) -> LossOutput:
    """Direct reward optimisation (arXiv:2405.19107): -sum_t w (A log pi - beta / 2 (log pi - log mu)^2)."""
    penalty_B_T = 0.5 * limits.beta * (terms.logprobs_B_T - terms.behaviour_B_T) ** 2
    return _token_sum(penalty_B_T - terms.advantages_B_T * terms.logprobs_B_T, terms)


def _bounds(terms: LossTerms, limits: Limits) -> tuple[Tensor, Tensor]:
    """Return the least and largest ratio, per token or for all tokens."""
    low, high = terms.logprobs_B_T.new_tensor((1 - limits.low, 1 + limits.high))
    return terms.extra.get("clip_low_threshold", low), terms.extra.get("clip_high_threshold", high)


def _pessimistic(log_ratio_B_T: Tensor, terms: LossTerms, limits: Limits) -> Tensor:
    ratio_B_T = log_ratio_B_T.exp()
    bound_B_T = ratio_B_T.clamp(*_bounds(terms, limits))
    return -torch.minimum(ratio_B_T * terms.advantages_B_T, bound_B_T * terms.advantages_B_T)


def _token_sum(loss_B_T: Tensor, terms: LossTerms) -> LossOutput:
    loss = (loss_B_T.masked_fill(~terms.mask(), 0.0) * terms.weights_B_T).sum()
    return LossOutput(loss, terms.weights_B_T.sum(), {})


TOKEN_LOSSES: Mapping[str, Loss] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "gspo_token": gspo_token,
    "cispo_token": cispo_token,
    "dro": dro,
}
"""Sums over tokens, without a correction."""

LOSSES: Mapping[str, Loss] = {
    **POLICY_LOSSES,
    **TOKEN_LOSSES,
    "cross_entropy": cross_entropy,
    "kl": kl,
    "entropy": entropy,
}
"""All losses by their name in `LossSpec.parts`."""


def loss_named(name: str) -> Loss:
    """Return a loss by its name in `LOSSES`, or by `module:function`.

    Raises:
        UserError: there is no such loss. A user's function raises a PenstockError for any failure inside it.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise UserError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    found = import_named("train.loss", name)
    if not callable(found):
        raise ConfigError(f"train.loss {name!r} is no function, but {found!r}")

    def own(terms: LossTerms, limits: Limits) -> LossOutput:
        with user_code(f"train.loss {name!r} failed", PenstockError):
            output: object = found(terms, limits)
        if not isinstance(output, LossOutput):
            raise PenstockError(f"train.loss {name!r} must return penstock.train.losses.LossOutput, got {output!r}")
        if getattr(output.loss, "ndim", 1) or terms.logprobs_B_T.requires_grad > output.loss.requires_grad:
            raise PenstockError(
                f"train.loss {name!r} must return one sum, with the gradient of terms.logprobs_B_T; got {output.loss!r}"
            )
        return output

    return own


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """The loss of each token, and where clips removed its gradient or cut its weight."""

    terms: LossTerms
    loss_B_T: Tensor
    clipped: Tensor
    truncated: Tensor
    keep_B_T: Tensor

    def kept(self) -> Tensor:
        return self.loss_B_T.masked_fill(~self.keep_B_T, 0.0) * self.terms.weights_B_T

    def sequences(self) -> Tensor:
        return self.keep_B_T.any(-1).sum()

    def by_token(self) -> LossOutput:
        return self.output(self.kept().sum(), (self.terms.weights_B_T * self.keep_B_T).sum())

    def by_sequence(self) -> LossOutput:
        """Sum over sequences of the mean over their tokens."""
        weight_B = (self.terms.weights_B_T * self.keep_B_T).sum(-1)
        return self.output((self.kept().sum(-1) / torch.where(weight_B == 0, 1.0, weight_B)).sum(), self.sequences())

    @torch.no_grad()
    def _sums(self) -> dict[str, Tensor]:
        mask_B_T, log_ratio_B_T = self.terms.mask(), self.terms.log_ratio()
        ratio_B_T = log_ratio_B_T.exp()
        return {
            "clip_fraction": (self.clipped & self.keep_B_T).sum(),
            "truncated_fraction": (self.truncated & self.keep_B_T).sum(),
            "masked_fraction": (mask_B_T & ~self.keep_B_T).sum(),
            "ratio_mean": (ratio_B_T * mask_B_T).sum(),
            "logprob_gap_k1": -log_ratio_B_T.sum(),
            "kl": ((ratio_B_T - 1 - log_ratio_B_T) * mask_B_T).sum(),
        }

    def output(self, loss: Tensor, denominator: Tensor) -> LossOutput:
        return LossOutput(loss, denominator, self._sums())


def _clipped(log_ratio_B_T: Tensor, terms: LossTerms, limits: Limits) -> _Surrogate:
    """Return PPO's pessimistic clipped surrogate (arXiv:1707.06347, eq. 7), corrected."""
    ratio_B_T = log_ratio_B_T.exp()
    free_B_T = ratio_B_T * terms.advantages_B_T
    low, high = (0.0, None) if limits.replaces_clip else (1 - limits.low, 1 + limits.high)
    bound_B_T = ratio_B_T.clamp(low, high) * terms.advantages_B_T
    clipped = free_B_T > bound_B_T
    # A detached factor scales value and gradient alike: min(r, cap) is the weight of grad log pi.
    cut_B_T = (limits.cap / ratio_B_T.detach()).clamp(max=1.0)
    loss_B_T = -torch.where(clipped, bound_B_T, cut_B_T * free_B_T)
    truncated = (cut_B_T < 1) & ~clipped & (terms.advantages_B_T != 0)
    return _Surrogate(terms, loss_B_T, clipped, truncated, limits.kept(terms))
