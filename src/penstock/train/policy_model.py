"""The model in training as one module: token ids in, logprobs and entropy of chosen places out.

No weight is read outside its forward pass, so that sharding and compilation see all of it.
"""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from penstock.errors import ConfigError
from penstock.train.batching import MicroBatch
from penstock.train.logprobs import TokenLogprobs, token_logprobs
from penstock.train.packed_attention import use_packed_attention

_HEAD_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config entries of models that do something to the logits after the output matrix."""


class PolicyModel(nn.Module):
    """A causal language model of transformers, without `[tokens, vocabulary]` logits.

    Args:
        model_path: folder or hub name of a causal language model; loaded in fp32.

    Attributes:
        model: the transformers model.

    Raises:
        ConfigError: the model cannot be loaded, or transforms its logits in a way that is not supported.
    """

    def __init__(self, model_path: str) -> None:
        super().__init__()
        self.model = _load_model(model_path)

    def forward(self, batch: MicroBatch, temperature: float) -> TokenLogprobs:
        """Of each wanted target, `[K]`; the output matrix sees only the places that predict one."""
        hidden_1_L_H = self.model.base_model(
            input_ids=batch.input_ids_1_L,
            position_ids=batch.position_ids_1_L,
            use_cache=False,
            cu_seq_lens_q=batch.bounds,
            max_length_q=batch.longest,
        ).last_hidden_state
        head = self.model.get_output_embeddings()
        return token_logprobs(hidden_1_L_H[0, batch.positions_K], head.weight, batch.targets_K, temperature)


def _load_model(model_path: str) -> Any:
    hf_logging.disable_progress_bar()  # it would write over the live display
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load model {model_path!r} for training: {error}") from error
    for name in _HEAD_TRANSFORMS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise ConfigError(f"model {model_path!r} sets {name}, which the learner does not support")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model {model_path!r} has a bias in its output layer, which the learner does not support")
    use_packed_attention(model, model_path)
    return model
