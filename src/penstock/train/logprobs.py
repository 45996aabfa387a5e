"""Log-probabilities of chosen tokens without fp32 logits `[tokens, vocabulary]`.

The output matrix is applied to a few hundred rows at a time, and again in the backward pass. Sums over the vocabulary
and over chunks are in fp32. Summing chunk gradients in bf16 lowers a policy's entropy within dozens of steps, although
each single step looks right.
"""

# torch's autograd functions ship without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 27
"""Maximum number of fp32 logits in memory at once: half a GiB, or 883 rows of Qwen3's vocabulary."""


class TokenLogprobs(NamedTuple):
    """`logprobs` of K tokens, and `entropy` of their distributions (nats). Both are fp32 with gradient."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    hidden_K_H: Tensor,
    weight_V_H: Tensor,
    targets_K: Tensor,
    temperature: float,
    *,
    fuse: bool = False,
    rows_K: Tensor | None = None,
) -> TokenLogprobs:
    """Return log softmax(hidden @ weight.T / temperature) of the targets, and entropies.

    Args:
        hidden_K_H: hidden states of the positions that predict a token, fp32 or bf16.
        weight_V_H: output matrix. Under autocast, both are multiplied in its dtype; else both must have one dtype.
        targets_K: int64, the token of each position.
        temperature: temperature of sampling; it divides the logits.
        fuse: compile the work on each chunk's logits, so that they pass through memory only once.
        rows_K: row of `hidden_K_H` for each target, ascending, if several targets share a place. Each row's logits are
            then computed once; None: one target per row.
    """
    device = hidden_K_H.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_V_H.dtype
    found: Any = _TokenLogprobs.apply(hidden_K_H, weight_V_H, targets_K, temperature, dtype, fuse, rows_K)
    logprobs, entropy = found
    return TokenLogprobs(logprobs, entropy if rows_K is None else entropy[rows_K])


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
        of_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype, ctx.fuse = temperature, dtype, fuse
        ctx.chunks = _chunks(len(hidden), rows, of_rows)
        narrow = weight.to(dtype).t()
        measure = _fused(_measure) if fuse else _measure
        wide = hidden.to(dtype)
        parts = [measure(wide[span] @ narrow, targets[at], own, temperature) for span, at, own in ctx.chunks]
        logprobs, entropy, normalizers = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalizers, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, entropy = ctx.saved_tensors
        wide, narrow = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        slope_of = _fused(_slope) if ctx.fuse else _slope
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if ctx.needs_input_grad[1] else None
        by_logprob, by_entropy = gradients
        for span, at, own in ctx.chunks:
            known = (targets[at], own, normalizers[span], entropy[span])
            given = (None if by_logprob is None else by_logprob[at], None if by_entropy is None else by_entropy[span])
            slope = slope_of(wide[span] @ narrow.t(), *known, *given, ctx.temperature)
            if to_hidden is not None:
                to_hidden[span] = slope @ narrow
            if to_weight is not None:
                to_weight += slope.t() @ wide[span]
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None, None


def _chunks(count: int, rows: int, of_rows: Tensor | None) -> list[tuple[slice, slice, Tensor | None]]:
    """Split rows into chunks: (rows, their targets, each target's row in the chunk, or None: its own)."""
    starts = range(0, max(count, 1), rows)  # without rows, one empty chunk
    spans = [slice(start, min(start + rows, count)) for start in starts]
    if of_rows is None:
        return [(span, span, None) for span in spans]
    bounds: list[int] = torch.searchsorted(of_rows, of_rows.new_tensor([*starts, count])).tolist()
    places = [slice(first, last) for first, last in itertools.pairwise(bounds)]
    return [(span, at, of_rows[at] - span.start) for span, at in zip(spans, places, strict=True)]


def _measure(logits: Tensor, targets: Tensor, own: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets' logprobs, the rows' entropies, and log softmax denominators."""
    wide = _widened(logits, temperature)
    normalizer = wide.logsumexp(-1)
    entropy = normalizer - ((wide - normalizer.unsqueeze(-1)).exp() * wide).sum(-1)
    if own is None:
        return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer, entropy, normalizer
    return wide[own, targets] - normalizer[own], entropy, normalizer


def _slope(
    logits: Tensor,
    targets: Tensor,
    own: Tensor | None,
    normalizer: Tensor,
    entropy: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the gradient of the logits from the gradients of logprobs and entropy.

    d logprob / d logits = (one at the target) - p; d entropy / d logits = -p (log p + entropy).
    """
    logs = _widened(logits, temperature) - normalizer.unsqueeze(-1)
    slope = torch.zeros_like(logs)
    if by_logprob is not None and own is not None:
        total = torch.zeros_like(normalizer).index_add_(0, own, by_logprob)
        slope = (-total.unsqueeze(-1) * logs.exp()).index_put_((own, targets), by_logprob, accumulate=True)
    elif by_logprob is not None:
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
