"""Causal attention over sequences packed into one row, in models of transformers.

All other layers must work on each token alone; then a packed row needs no padding. `cu_seq_lens_q` (FlashAttention's
name for the bounds of the sequences in the row) and `max_length_q` travel as keyword arguments of the model.
"""

# transformers and torch's varlen attention ship partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from penstock.errors import ConfigError

NAME = "penstock_packed"
_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters
"""Options of torch's varlen attention. They differ by version: `is_causal` or a window, and `enable_gqa`."""
_UNSUPPORTED = ("attn_logit_softcapping", "attention_chunk_size")
"""Config entries of models whose attention is not softmax(QK) V, or whose mask has chunks that ours lacks."""
_PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that keep the sequences of a row apart. A convolution or a recurrence runs over the whole row."""


def use_packed_attention(model: Any, name: str) -> None:
    """Make a transformers model attend only within the sequences of a packed row.

    Raises:
        ConfigError: the model's attention cannot be replaced. The message has the model's `name`.
    """
    config = model.config.get_text_config()
    kinds: Any = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if others := sorted(set(kinds) - _PACKED_LAYERS):
        raise ConfigError(
            f"model {name!r} has layers of type {', '.join(others)}, which would mix the sequences that the learner "
            f"packs into a row; train a model of {' and '.join(sorted(_PACKED_LAYERS))} alone"
        )
    for entry in _UNSUPPORTED:
        if getattr(config, entry, None):
            raise ConfigError(f"model {name!r} sets {entry}, which the learner's packed attention does not compute")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) does not let its attention be chosen, as packing needs"
        )
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _window_of_mask)
    model.set_attn_implementation(NAME)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence of one packed row.

    Query, key and value are `[1, heads, tokens, width]`; key and value may have fewer heads, each for a group of the
    query's. `attention_mask` is the window of models that have it only in their mask (`_window_of_mask`).
    `sliding_window` counts the tokens that a token sees, itself included. `scaling` None: 1 / sqrt(width).

    Returns:
        `[1, tokens, heads, width]`, and None in place of the attention weights.
    """
    if others.get("s_aux") is not None:
        raise ConfigError("the learner's packed attention knows no attention sinks; train another model")
    if cu_seq_lens_q is None or isinstance(attention_mask, Tensor):
        why = (
            "has a mask of its own" if cu_seq_lens_q is not None else "is not given where the sequences of a row begin"
        )
        raise ConfigError(f"the model's {type(module).__name__} {why}, so the learner cannot pack; train another model")
    if torch.is_autocast_enabled(query.device.type):
        # Norms and rotations leave queries and keys in fp32.
        narrow = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
    window = attention_mask if sliding_window is None else sliding_window
    window = window if window is not None and window < max_length_q else None
    count = len(cu_seq_lens_q) - 1
    if query.is_cuda and count > 1 and window is None and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling), None
    if query.shape[2] == count * max_length_q:  # all sequences have one length, or there is only one
        query, key, value = (part[0].unflatten(1, (count, -1)).transpose(0, 1) for part in (query, key, value))
        return _padded(query, key, value, scaling, dropout, window).transpose(1, 2).flatten(0, 1).unsqueeze(0), None
    # A micro-batch's sequences have similar lengths, so this padding, for attention only, is small.
    bounds = cu_seq_lens_q.to(torch.int64)
    tokens = torch.arange(query.shape[2], device=query.device)
    row_L = torch.searchsorted(bounds[1:], tokens, right=True)
    rows_B_T = bounds[:-1].unsqueeze(-1) + torch.arange(max_length_q, device=query.device)
    rows_B_T = rows_B_T.clamp(max=query.shape[2] - 1)
    query, key, value = (part[0][:, rows_B_T].transpose(0, 1) for part in (query, key, value))
    out_B_A_T_D = _padded(query, key, value, scaling, dropout, window)
    return out_B_A_T_D.transpose(1, 2)[row_L, tokens - bounds[row_L]].unsqueeze(0), None


def _padded(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """Attend causally in right-padded rows: `[sequences, heads, tokens, width]`. No token sees padding."""
    mask = None
    if window is not None:
        age = torch.arange(query.shape[2], device=query.device)
        age = age.unsqueeze(-1) - age
        mask = (age >= 0) & (age < window)
    gqa = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )


def _varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scaling: float | None) -> Tensor:
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    options: dict[str, Any] = {} if scaling is None else {"scale": scaling}
    options |= {"is_causal": True} if "is_causal" in _VARLEN_OPTIONS else {"window_size": (-1, 0)}
    if "enable_gqa" in _VARLEN_OPTIONS:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    attend: Any = varlen_attn
    return attend(query, key, value, bounds, bounds, longest, longest, **options).unsqueeze(0)


def _window_of_mask(*_: Any, local_size: int | None = None, **__: Any) -> int | None:
    """Take the place of a mask. Packed attention needs only its window and the sequences' bounds."""
    return local_size
