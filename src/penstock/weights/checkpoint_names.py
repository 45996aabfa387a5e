"""A model's tensors under their names in its checkpoint, which are the names that engines load."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's tensors as `save_pretrained` would name and shape them.

    In memory transformers (5.0 and newer) keeps the experts of a layer in one tensor, `mlp.experts.gate_up_proj` of
    shape `[experts, 2 * width, hidden]`. In checkpoints and in vLLM, each expert has its own tensor. For a dense model
    the result is its `named_parameters()`. Other checkpoints also hold buffers, such as the biases of a router. Tied
    tensors appear once, under their first name. Adapters that PEFT added are left out.

    Returns:
        Tensors by name. Tensors that had to be split may be copies.
    """
    return checkpoint_names_of(model, distinct_tensors(model))


def tensors_of_config(config: Any) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors of a transformers config, without memory."""
    import torch  # noqa: PLC0415 - slow to import, needed once
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - the same

    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
    return checkpoint_tensors(model)


def distinct_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's own live tensors by name, tied ones only once."""
    once: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            once.setdefault(id(tensor), (plain_name(name), tensor))
    return dict(once.values())


def checkpoint_names_of(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert whole layers to the names and shapes of the model's checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - slow, and not a core dependency

    return cast("dict[str, torch.Tensor]", revert_weight_conversion(model, tensors))


def is_adapter(name: str) -> bool:
    """Whether a tensor of a `state_dict` belongs to an adapter of PEFT."""
    return "lora_" in name


def plain_name(name: str) -> str:
    """Return a tensor's name in the model without PEFT's wrappers."""
    return name.replace(".base_layer.", ".")
