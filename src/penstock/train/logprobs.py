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
    """Of K tokens, fp32 and with gradient: `logprobs`, and `entropy` (nats, of the whole distribution)."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(hidden_K_H: Tensor, weight_V_H: Tensor, targets_K: Tensor, temperature: float) -> TokenLogprobs:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of each distribution.

    Args:
        hidden_K_H: hidden states of the positions that predict a token, fp32 or bf16.
        weight_V_H: output matrix. Under autocast both are multiplied in its dtype; else they must be of one dtype.
        targets_K: int64, the token of each position.
        temperature: of sampling; the logits are divided by it.
    """
    device = hidden_K_H.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_V_H.dtype
    found: Any = _TokenLogprobs.apply(hidden_K_H, weight_V_H, targets_K, temperature, dtype)
    return TokenLogprobs(*found)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return (hidden @ weight.t()).to(wide).div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.rows, ctx.dtype = temperature, rows, dtype
        narrow = weight.to(dtype)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        normalizers: list[Tensor] = []
        for part, wanted in zip(hidden.to(dtype).split(rows), targets.split(rows), strict=True):
            logits = _logits(part, narrow, temperature)
            normalizer = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
            shares = (logits - normalizer.unsqueeze(-1)).exp_()
            entropies.append(normalizer - shares.mul_(logits).sum(-1))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers), entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normalizers, entropy = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        wide, narrow = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            span = slice(start, start + ctx.rows)
            logs = _logits(wide[span], narrow, ctx.temperature).sub_(normalizers[span].unsqueeze(-1))
            # d entropy / d logits = -p (log p + entropy); d logprob / d logits = (one at the target) - p
            factor = logs.new_zeros(len(logs), 1) if by_logprob is None else -by_logprob[span].unsqueeze(-1)
            if by_entropy is not None:
                factor = factor - by_entropy[span].unsqueeze(-1) * (logs + entropy[span].unsqueeze(-1))
            slope = logs.exp_().mul_(factor)
            if by_logprob is not None:
                slope.scatter_add_(-1, targets[span].unsqueeze(-1), by_logprob[span].unsqueeze(-1).to(slope.dtype))
            slope = slope.div_(ctx.temperature).to(ctx.dtype)
            if to_hidden is not None:
                to_hidden[span] = slope @ narrow
            if to_weight is not None:
                to_weight += slope.t() @ wide[span]
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None
