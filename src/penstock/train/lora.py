"""Low-rank adapters in a model, by PEFT: one in a pass, or several for own tokens."""

# peft ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.errors import UserError
from penstock.train.interface import LoraSpec
from penstock.weights.checkpoint_names import checkpoint_names_of

_PREFIX = "base_model.model."
"""Prefix of tensor names in PEFT's checkpoints. It comes from PEFT's wrapper, which is not used here."""
_ROUTER = re.compile(r"\.(router|gate|shared_expert_gate)$")
"""Matrices that choose or weigh experts. No adapter changes them."""


class Adapters:
    """The adapters of one transformers model, which is changed in place; see `Learner`.

    Matrices that an adapter changes are wrapped, and everything else is frozen. If the layers are compiled, PEFT's
    functions compute; else our faster ones do.
    """

    def __init__(self, model: Any, *, compiled: bool = False) -> None:
        self._model = model
        self._compiled = compiled
        self._active: str | None = None
        self._row: _Row | None = None
        self._configs: dict[str, LoraConfig] = {}
        self._keys: dict[str, str] = {}  # PEFT's names are attributes of modules, so they may hold no dots
        self._parameters: dict[str, dict[str, Parameter]] = {}
        self._layers: list[Any] = []
        self._merged: dict[str, Mapping[str, LoraLayer]] = {}
        self._made = 0

    def create(self, name: str, spec: LoraSpec) -> None:
        if name in self._keys:
            raise UserError(f"the learner has an adapter {name!r} already; drop it first or choose another name")
        if spec.rank < 1:
            raise UserError(f"an adapter's rank must be at least 1, got {spec.rank}")
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.rank if spec.alpha is None else spec.alpha,  # pyright: ignore[reportArgumentType] - it only divides
            target_modules=self._targets(spec),
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=self._model.config.name_or_path,
        )
        key = f"adapter{self._made}"
        self._made += 1
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about a second adapter and about tied embeddings
            torch.manual_seed(spec.seed)
            inject_adapter_in_model(config, self._model, adapter_name=key)
        self._configs[name], self._keys[name] = config, key
        self._layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in () if self._compiled else self._layers:
            layer.forward = partial(self._through, layer)
        part, named = f".{key}.", self._model.named_parameters()
        own = {_PREFIX + full.replace(part, "."): parameter for full, parameter in named if part in full}
        for parameter in own.values():
            parameter.data = parameter.data.float()
        self._parameters[name] = own

    def drop(self, name: str) -> None:
        key = self._keys.pop(name)
        self._merged.pop(name, None)
        del self._configs[name], self._parameters[name]
        for layer in self._layers:
            layer.set_adapter([])  # else PEFT activates another adapter, with a warning
            layer.delete_adapter(key)
        del self._model.peft_config[key]  # PEFT keeps the settings of every adapter there ever was

    def activate(self, name: str | None) -> None:
        """Make the model compute with one adapter, or without any (None). Only its tensors get gradients."""
        # PEFT's own set_adapter freezes the others tensor by tensor. With dozens of adapters, this takes longer than a
        # small batch. An adapter that does not compute gets no gradient anyway.
        for layer in self._layers:
            layer._disable_adapters = name is None  # noqa: SLF001
            layer._active_adapter = [] if name is None else [self._keys[name]]  # noqa: SLF001
        self._active = None if name is None else self._keys[name]
        for parameter in () if name is None else self._parameters[name].values():
            parameter.requires_grad_(True)  # noqa: FBT003

    @contextmanager
    def together(self, stretches: Sequence[tuple[str, int]], device: torch.device) -> Generator[None]:
        """Compute each stretch of a packed row with its own adapter, forward and backward.

        `stretches`: `(adapter, tokens)`, in the order of the row.
        """
        self._row = _Row([(self._keys[name], tokens) for name, tokens in stretches], device)
        try:
            yield
        finally:
            self._row = None

    def parameters(self, name: str) -> Mapping[str, Parameter]:
        """Return the adapter's tensors by PEFT's checkpoint names."""
        return self._parameters[name]

    def config(self, name: str) -> Mapping[str, Any]:
        """Return PEFT's `adapter_config` with JSON values."""
        values = self._configs[name].to_dict()
        return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}

    def merged(self, name: str) -> Mapping[str, LoraLayer]:
        """Return the base's layers that an adapter changes, by their checkpoint names.

        Raises:
            UserError: the adapter changes an output matrix that is also the input matrix, or a matrix that the
                checkpoint stores in other pieces.
        """
        if name in self._merged:
            return self._merged[name]
        key, blanks, layers = self._keys[name], dict[str, Tensor](), dict[int, LoraLayer]()
        for full, layer in self._model.named_modules():
            if isinstance(layer, LoraLayer) and key in layer.lora_A:
                blank = blanks[f"{full}.weight"] = torch.empty_like(layer.weight, device="meta")
                layers[id(blank)] = layer
        head = self._model.get_output_embeddings()
        if head in layers.values() and self._model.config.get_text_config().tie_word_embeddings:
            raise UserError("an adapter of the output matrix cannot be merged where that is the input matrix as well")
        named = checkpoint_names_of(self._model, dict(blanks))
        if wrong := [stored for stored, blank in named.items() if id(blank) not in layers]:
            raise UserError(f"the adapter cannot be merged: the checkpoint has {wrong[0]!r} in other pieces")
        self._merged[name] = {stored: layers[id(blank)] for stored, blank in named.items()}
        return self._merged[name]

    def delta(self, name: str, layer: Any) -> Tensor:
        """Return alpha / rank * B A of one matrix, in its shape."""
        return layer.get_delta_weight(self._keys[name])

    def _through(self, layer: Any, x: Tensor) -> Tensor:
        """Compute one wrapped matrix with the active adapter, or with those of a row."""
        if self._row is not None:
            return self._row.through(layer, x)
        if self._active is None or self._active not in layer.lora_A:
            return layer.base_layer(x)
        halves = layer.lora_A[self._active].weight, layer.lora_B[self._active].weight
        return _adapted(layer.base_layer, x, *halves, layer.scaling[self._active])

    def _targets(self, spec: LoraSpec) -> list[str]:
        """Return the names of the chosen matrices. Refuse a spec if the model lacks them or cannot adapt them."""
        head, layers = _base(self._model.get_output_embeddings()), self._model.base_model.layers
        inside = set(layers.modules())
        found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
        for name, module in self._model.named_modules():
            matrix = _base(module)
            if not isinstance(matrix, nn.Linear) or name.endswith(".base_layer") or _ROUTER.search(name):
                continue
            if matrix is head:
                found["train_unembed"].append(name)
            elif module in inside:
                found["train_attn" if "attn" in name or "attention" in name else "train_mlp"].append(name)
        wanted = [kind for kind in found if getattr(spec, kind)]
        if not wanted:
            raise UserError(f"{spec} chooses no matrix of this model; set train_attn, train_mlp or train_unembed")
        if spec.train_mlp and any(parameter.ndim > 2 for parameter in layers.parameters()):  # noqa: PLR2004 - a matrix
            raise UserError("an adapter cannot change this model's experts; set train_mlp to false to adapt the rest")
        for kind in wanted:
            if not found[kind]:
                raise UserError(f"{kind} chooses no matrix of this model; set {kind} to false")
        return [name for kind in wanted for name in found[kind]]


class _Row:
    """A packed row whose stretches, `(PEFT's name, tokens)` in order, have their own adapters.

    All adapters of a matrix compute as one adapter, whose rank is the sum of theirs. A mask keeps each token's own
    adapter. A few large products are faster than many small ones.
    """

    def __init__(self, stretches: Sequence[tuple[str, int]], device: torch.device) -> None:
        self._keys = list(dict.fromkeys(key for key, _ in stretches))
        numbers = torch.tensor([self._keys.index(key) for key, _ in stretches])
        self._owners_L = numbers.repeat_interleave(torch.tensor([tokens for _, tokens in stretches])).to(device)
        self._masks: dict[tuple[tuple[str, int, float], ...], Tensor] = {}

    def through(self, layer: Any, x: Tensor) -> Tensor:
        """Compute one wrapped matrix, `[1, L, in]` to `[1, L, out]`."""
        own = [key for key in self._keys if key in layer.lora_A]
        if not own:
            return layer.base_layer(x)
        narrow_R_I = torch.cat([layer.lora_A[key].weight for key in own])
        wide_O_R = torch.cat([layer.lora_B[key].weight for key in own], dim=1)
        mask_L_R = self._mask(tuple((key, layer.r[key], float(layer.scaling[key])) for key in own))
        return _adapted(layer.base_layer, x, narrow_R_I, wide_O_R, mask_L_R)

    def _mask(self, columns: tuple[tuple[str, int, float], ...]) -> Tensor:
        """Return `[L, ranks]`: an adapter's factor on its own tokens, else 0."""
        if columns not in self._masks:
            ranks = torch.tensor([rank for _, rank, _ in columns])
            owners = torch.tensor([self._keys.index(key) for key, _, _ in columns]).repeat_interleave(ranks)
            factors = torch.tensor([factor for _, _, factor in columns]).repeat_interleave(ranks)
            device = self._owners_L.device
            self._masks[columns] = (self._owners_L.unsqueeze(-1) == owners.to(device)) * factors.to(device)
        return self._masks[columns]


def _adapted(base: Any, x: Tensor, narrow_R_I: Tensor, wide_O_R: Tensor, factor: Tensor | float) -> Tensor:
    """Return x W^T + bias + (factor * x A^T) B^T, in autocast's dtype or else in x's."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    found: Any = _Adapted.apply(x, base.weight, base.bias, narrow_R_I, wide_O_R, factor, dtype)
    return found


class _Adapted(torch.autograd.Function):
    """See `_adapted`. One function with sums in place; PEFT has eight functions, and casts x twice under autocast."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, factor: Tensor | float,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        rows, weight, narrow, wide = (each.to(dtype) for each in (x.reshape(-1, x.shape[-1]), weight, a, b))
        factor = factor.to(dtype) if isinstance(factor, Tensor) else factor
        inner = (rows @ narrow.t()).mul_(factor)
        out = nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype))
        ctx.save_for_backward(rows, weight, narrow, wide, inner)
        ctx.factor, ctx.dtypes = factor, (x.dtype, a.dtype, b.dtype)
        return out.addmm_(inner, wide.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, narrow, wide, inner = ctx.saved_tensors
        of_x, of_a, of_b = ctx.dtypes
        gradient = gradients[0].reshape(len(rows), -1).to(rows.dtype)
        by_inner = (gradient @ wide).mul_(ctx.factor)
        by_x = None
        if ctx.needs_input_grad[0]:
            flat = (gradient @ weight).addmm_(by_inner, narrow)
            by_x = flat.view(*gradients[0].shape[:-1], -1).to(of_x)
        by_a, by_b = (by_inner.t() @ rows).to(of_a), (gradient.t() @ inner).to(of_b)
        return by_x, None, None, by_a, by_b, None, None


def _base(module: nn.Module) -> nn.Module:
    """Return the module inside an adapter's wrapper."""
    return module.get_base_layer() if isinstance(module, LoraLayer) else module
