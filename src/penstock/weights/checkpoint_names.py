"""A model's tensors under the names that its checkpoint has, which are the names that engines load."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a model, named and shaped as `save_pretrained` would write them.

    In memory transformers (5.0 and newer) keeps the experts of a layer in one tensor, `mlp.experts.gate_up_proj` of
    shape `[experts, 2 * width, hidden]`; in checkpoints, and so in vLLM, each expert has its own. For a dense model
    these are its `named_parameters()`; others have buffers that their checkpoints hold too, such as the biases of a
    router. Tied tensors appear once, under their first name. Adapters that PEFT put in are left out.

    Returns:
        Names to tensors; those that had to be taken apart may be copies.
    """
    return checkpoint_names_of(model, distinct_tensors(model))


def distinct_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's own tensors by their names in it, live; tied ones once."""
    once: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            once.setdefault(id(tensor), (plain_name(name), tensor))
    return dict(once.values())


def checkpoint_names_of(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some of a model's tensors, whole layers, named and shaped as its checkpoint has them."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - slow, and not of the core

    return cast("dict[str, torch.Tensor]", revert_weight_conversion(model, tensors))


def is_adapter(name: str) -> bool:
    """Whether a tensor of a model's `state_dict` belongs to an adapter that PEFT put in."""
    return "lora_" in name


def plain_name(name: str) -> str:
    """Return what a tensor is called where PEFT has wrapped no matrix."""
    return name.replace(".base_layer.", ".")
