"""Log-probabilities of chosen tokens without a `[tokens, vocabulary]` tensor in fp32.

The output matrix is applied to a few hundred rows at a time, and again in the backward pass. Sums over the vocabulary
and over chunks are in fp32: gradients of chunks that were summed in bf16 lower a policy's entropy within dozens of
steps, while each step looks right.
"""

# torch's autograd functions ship without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27
"""Logits in fp32 that exist at once, at most: half a GiB, which is 883 rows of Qwen3's vocabulary."""


class TokenLogprobs(NamedTuple):
    """Of K tokens, fp32 and with gradient: `logprobs`, and `entropy` (nats, of the whole distribution)."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    hidden_K_H: Tensor, weight_V_H: Tensor, targets_K: Tensor, temperature: float, *, fuse: bool = False
) -> TokenLogprobs:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of each distribution.

    Args:
        hidden_K_H: hidden states of the positions that predict a token, fp32 or bf16.
        weight_V_H: output matrix. Under autocast both are multiplied in its dtype; else they must be of one dtype.
        targets_K: int64, the token of each position.
        temperature: of sampling; the logits are divided by it.
        fuse: compile what is done to each chunk's logits, so that they pass through memory once.
    """
    device = hidden_K_H.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_V_H.dtype
    found: Any = _TokenLogprobs.apply(hidden_K_H, weight_V_H, targets_K, temperature, dtype, fuse)
    return TokenLogprobs(*found)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        fuse: bool,  # noqa: FBT001 - an autograd function takes no keywords
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.rows, ctx.dtype, ctx.fuse = temperature, rows, dtype, fuse
        narrow = weight.to(dtype).t()
        measure = _fused(_measure) if fuse else _measure
        parts = [
            measure(part @ narrow, wanted, temperature)
            for part, wanted in zip(hidden.to(dtype).split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropy, normalizers = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, normalizers, entropy = ctx.saved_tensors
        wide, narrow = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        slope_of = _fused(_slope) if ctx.fuse else _slope
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            span = slice(start, start + ctx.rows)
            by_logprob, by_entropy = (None if gradient is None else gradient[span] for gradient in gradients)
            known = (targets[span], normalizers[span], entropy[span])
            slope = slope_of(wide[span] @ narrow.t(), *known, by_logprob, by_entropy, ctx.temperature)
            if to_hidden is not None:
                to_hidden[span] = slope @ narrow
            if to_weight is not None:
                to_weight += slope.t() @ wide[span]
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _measure(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: logprob of the target, entropy, and the logarithm of the softmax's denominator."""
    wide = _widened(logits, temperature)
    normalizer = wide.logsumexp(-1)
    entropy = normalizer - ((wide - normalizer.unsqueeze(-1)).exp() * wide).sum(-1)
    return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer, entropy, normalizer


def _slope(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient of the logits, given those of logprobs and entropy.

    d logprob / d logits = (one at the target) - p; d entropy / d logits = -p (log p + entropy).
    """
    logs = _widened(logits, temperature) - normalizer.unsqueeze(-1)
    slope = torch.zeros_like(logs)
    if by_logprob is not None:
        at_target = torch.arange(logs.shape[-1], device=logs.device) == targets.unsqueeze(-1)
        slope = by_logprob.unsqueeze(-1) * (at_target.to(logs.dtype) - logs.exp())
    if by_entropy is not None:
        slope = slope - by_entropy.unsqueeze(-1) * logs.exp() * (logs + entropy.unsqueeze(-1))
    return (slope / temperature).to(logits.dtype)


def _widened(logits: Tensor, temperature: float) -> Tensor:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.to(wide) / temperature


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
