"""Log-probabilities of chosen tokens without a `[tokens, vocabulary]` tensor in fp32.

The output matrix is applied to a few hundred rows at a time, and again in the backward pass. Sums over the vocabulary
and over chunks are in fp32: gradients of chunks that were summed in bf16 lower a policy's entropy within dozens of
steps, while each step looks right.
"""

# torch's autograd functions ship without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 28
"""Logits in fp32 that exist at once, at most: 1 GiB, which is 1,766 rows of Qwen3's vocabulary."""


class TokenLogprobs(NamedTuple):
    """Of K tokens, fp32: `logprobs` with gradient, `entropy` (nats, of the whole distribution) without."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(hidden_K_H: Tensor, weight_V_H: Tensor, targets_K: Tensor, temperature: float) -> TokenLogprobs:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of each distribution.

    Args:
        hidden_K_H: hidden states of the positions that predict a token, fp32 or bf16.
        weight_V_H: output matrix, of the same dtype.
        targets_K: int64, the token of each position.
        temperature: of sampling; the logits are divided by it.
    """
    found: Any = _TokenLogprobs.apply(hidden_K_H, weight_V_H, targets_K, temperature)
    return TokenLogprobs(*found)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (hidden @ weight.t()).to(wide).div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        normalizers: list[Tensor] = []
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _logits(part, weight, temperature)
            normalizer = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
            shares = (logits - normalizer.unsqueeze(-1)).exp_()
            entropies.append(normalizer - shares.mul_(logits).sum(-1))
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.temperature, ctx.rows = temperature, rows
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            span = slice(start, start + ctx.rows)
            # d logprob / d logits = (one at the target) - softmax, over the temperature
            slope = _logits(hidden[span], weight, ctx.temperature).sub_(normalizers[span].unsqueeze(-1)).exp_().neg_()
            slope.scatter_add_(-1, targets[span].unsqueeze(-1), slope.new_ones(len(slope), 1))
            slope.mul_(gradients[0][span].unsqueeze(-1) / ctx.temperature)
            narrow = slope.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[span] = narrow @ weight
            if to_weight is not None:
                to_weight += narrow.t() @ hidden[span]
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None
