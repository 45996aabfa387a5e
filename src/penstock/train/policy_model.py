"""The model in training as one module: ids in, logprobs and entropy of places out.

All weights are read within its forward pass, so that sharding and compilation see every use.
"""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.train.batching import MicroBatch
from penstock.train.interface import UNKNOWN_EXPERT
from penstock.train.logprobs import TokenLogprobs, token_logprobs

_HEAD_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config entries of models that transform the logits after the output matrix."""
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001 - its public name dispatches to these
    torch.ops.aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
    torch.ops.torch_attn._varlen_attn.default,  # noqa: SLF001
}
"""Operations whose outputs `recompute: selective` keeps."""
_NORMALISED = {"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"}
_ALWAYS_NORMALISED = {"MixtralTopKRouter"}
"""Router classes with a softmax over experts. The first kind normalises the chosen if `norm_topk_prob`."""
_PACKED = "penstock_packed"
_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters
"""Options of torch's varlen attention. They differ by version: `is_causal` or a window, and `enable_gqa`."""
_UNSUPPORTED_ATTENTION = ("attn_logit_softcapping", "attention_chunk_size")
"""Config entries of models whose attention is not softmax(QK) V, or whose mask has chunks that ours lacks."""
_PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that keep the sequences of a row apart. A convolution or a recurrence runs over the whole row."""


class PolicyModel(nn.Module):
    """A causal language model of transformers, without `[tokens, vocabulary]` logits.

    `model` may still be without weights. `autocast`: multiply matrices in bf16 by autocast; off if the weights are
    cast.

    Raises:
        ConfigError: the model's logits or attention are not supported.
    """

    def __init__(self, model: Any, model_path: str, config: TrainConfig, device: torch.device) -> None:
        super().__init__()
        _check(model, model_path)
        use_packed_attention(model, model_path)
        self.model = model
        self.device_type = device.type
        self.fuse = config.compile
        self.autocast = compute_dtype(config, device) == torch.bfloat16
        self.replay = RouterReplay(self.layers)
        for layer in self.layers:
            _prepare(layer, config, pin_memory=device.type == "cuda")

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.base_model.layers

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().num_embeddings

    def forward(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """Return the results for each wanted target, `[K]`. The output matrix sees only places with a target."""
        return self.measure(self.hidden(batch), batch, temperature)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states of the last layer, `[1, L, width]`."""
        self.replay.begin(batch.experts_L_N_K)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.autocast):
            return self.model.base_model(
                input_ids=batch.input_ids_1_L,
                position_ids=batch.position_ids_1_L,
                use_cache=False,
                cu_seq_lens_q=batch.bounds,
                max_length_q=batch.longest,
            ).last_hidden_state

    def measure(self, hidden_1_L_H: Tensor, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """Return the targets' logprobs, `[K]`, by the output matrix and its active adapter."""
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.autocast):
            weight = _effective_weight(self.model.get_output_embeddings())
            positions, rows = batch.positions_K, None
            if batch.several:
                positions, rows = torch.unique_consecutive(positions, return_inverse=True)
            return token_logprobs(
                hidden_1_L_H[0, positions], weight, batch.targets_K, temperature, fuse=self.fuse, rows_K=rows
            )


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: `train.dtype`. Default: bf16 on CUDA, fp32 elsewhere."""
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    return default if config.dtype == "auto" else getattr(torch, config.dtype)


def weights_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of held weights: fp32 if trained, else the computing dtype."""
    return torch.float32 if config.lora is None else compute_dtype(config, device)


def _prepare(layer: nn.Module, config: TrainConfig, *, pin_memory: bool) -> None:
    """Make a decoder layer recompute, offload and compile as configured. Its names stay as they are."""
    forward: Callable[..., Any] = layer.forward
    # Compile outside of a selective recomputation, which looks into the graph, and within a full one, which does not.
    # The activations that the layer keeps then pass through autograd's hooks.
    if config.compile and config.recompute != "selective":
        forward = torch.compile(forward)
    if config.recompute != "none":
        forward = _recomputed(forward, config, pin_memory=pin_memory)
    if config.compile and config.recompute == "selective":
        forward = torch.compile(forward)
    layer.forward = forward


def _recomputed(forward: Callable[..., Any], config: TrainConfig, *, pin_memory: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if config.recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with save_on_cpu(pin_memory=pin_memory) if config.offload_activations else nullcontext():
            return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _keep_attention(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _effective_weight(matrix: Any) -> Tensor:
    """Return the output matrix's weight, with the active adapter if PEFT wrapped it."""
    if not hasattr(matrix, "base_layer"):
        return matrix.weight
    weight: Tensor = matrix.base_layer.weight
    for key in () if matrix.disable_adapters else matrix.active_adapters:
        if key in matrix.lora_A:
            weight = weight + matrix.get_delta_weight(key)
    return weight


def _check(model: Any, model_path: str) -> None:
    """Refuse a model without `layers`, or with logits that need more than the output matrix."""
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise ConfigError(
            f"model {model_path!r} ({type(model).__name__}) has no `layers` as llama-like ones have; train one of those"
        )
    for name in _HEAD_TRANSFORMS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise ConfigError(f"model {model_path!r} sets {name}, which the learner does not support")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model {model_path!r} has a bias in its output layer, which the learner does not support")


# --- causal attention over sequences packed into one row -------------------------------------------------------------

# All other layers must work on each token alone; then a packed row needs no padding. `cu_seq_lens_q` (FlashAttention's
# name for the bounds of the sequences in the row) and `max_length_q` travel as keyword arguments of the model.


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
    for entry in _UNSUPPORTED_ATTENTION:
        if getattr(config, entry, None):
            raise ConfigError(f"model {name!r} sets {entry}, which the learner's packed attention does not compute")
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model {name!r} ({type(model).__name__}) does not let its attention be chosen, as packing needs"
        )
    AttentionInterface.register(_PACKED, packed_attention)
    AttentionMaskInterface.register(_PACKED, _window_of_mask)
    model.set_attn_implementation(_PACKED)


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


class RouterReplay:
    """Makes a mixture of experts compute with its engine's experts (arXiv 2510.11370). Other layers are skipped.

    Engine and learner round differently. Near a tie, their routers choose different experts, and logprobs jump. The
    learner uses the engine's choice of experts but computes their weights itself, so that the router still learns.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = len(layers)
        self._experts_L_N_K: Tensor | None = None
        self._others: set[str] = set()
        self._top_k: int | None = None
        self._experts = 0
        for index, layer in enumerate(layers):
            for module in layer.modules():
                kind = type(module).__name__
                if kind in _NORMALISED | _ALWAYS_NORMALISED:
                    router: Any = module
                    self._top_k, self._experts = int(router.top_k), int(router.weight.shape[0])
                    normalised = kind in _ALWAYS_NORMALISED or bool(router.norm_topk_prob)
                    module.register_forward_hook(self._hook(index, normalised=normalised))
                elif kind.endswith("Router"):
                    self._others.add(kind)

    def begin(self, experts_L_N_K: Tensor | None) -> None:
        """Replay these experts from now on, also when a backward pass recomputes layers; None: replay nothing.

        They are ids, `[tokens, layers, experts a token]`; `UNKNOWN_EXPERT` where the engine reported none.
        """
        self._experts_L_N_K = experts_L_N_K

    def check(self, experts_L_N_K: Tensor) -> None:
        """Raise ConfigError if the model cannot replay experts, or lacks these."""
        if self._others or self._top_k is None:
            has = f"has the routers {', '.join(sorted(self._others))}" if self._others else "has no experts"
            known = ", ".join(sorted(_NORMALISED | _ALWAYS_NORMALISED))
            raise ConfigError(f"experts cannot be replayed: the learner's model {has}; known routers are {known}")
        wanted, shape = (self._layers, self._top_k), tuple(experts_L_N_K.shape)
        if shape[1:] != wanted:
            raise ConfigError(
                f"the engine's experts are {shape[1:]} (layers, experts a token), and the learner's model has "
                f"{wanted}: they are not of one model"
            )
        if (most := int(experts_L_N_K.max())) >= self._experts:
            raise ConfigError(
                f"the engine reports the expert {most}, and the learner's model has the experts 0 to "
                f"{self._experts - 1}: they are not of one model"
            )

    def _hook(self, index: int, *, normalised: bool) -> Any:
        def replay(_router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._experts_L_N_K is None:
                return output
            logits, scores, own = output
            given = self._experts_L_N_K[:, index].to(own)
            experts = torch.where(given == UNKNOWN_EXPERT, own, given)
            weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
            if normalised:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(scores.dtype), experts

        return replay
