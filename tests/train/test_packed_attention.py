from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from random_trajectories import trajectory
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from penstock.config import TrainConfig
from penstock.errors import ConfigError
from penstock.train.batching import collate
from penstock.train.grpo import datum_of
from penstock.train.learner import LocalLearner
from penstock.train.losses import LossSpec
from penstock.train.policy_model import use_packed_attention

SMALL = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = [
    Qwen3Config(**SMALL),
    LlamaConfig(**SMALL),
    MistralConfig(**SMALL, sliding_window=4),
    Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    PhimoeConfig(**SMALL, sliding_window=3, num_local_experts=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["qwen3", "llama", "sliding", "half-sliding", "window-in-the-mask"])
@pytest.mark.parametrize("lengths", [(6,), (9, 2, 5), (1, 1, 1, 12), (5, 5, 5)])
def test_a_packed_row_equals_each_sequence_alone(config: PretrainedConfig, lengths: tuple[int, ...]):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    model = model if config.model_type == "phimoe" else model.double()  # experts are not computed in fp64
    sequences = [torch.randint(24, (size + 1,)).tolist() for size in lengths]
    alone = [model.base_model(torch.tensor([ids[:-1]])).last_hidden_state for ids in sequences]
    use_packed_attention(model, "a model")
    batch = collate([datum_of(trajectory(ids[:1], ids[1:]), 0.0) for ids in sequences], LossSpec({"dapo": 1.0}))
    packed = model.base_model(
        batch.input_ids_1_L, position_ids=batch.position_ids_1_L, cu_seq_lens_q=batch.bounds, max_length_q=batch.longest
    ).last_hidden_state
    torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (Qwen3NextConfig(**SMALL), "layers of type linear_attention"),
        (Llama4TextConfig(**SMALL), "layers of type chunked_attention"),
        (RecurrentGemmaConfig(**SMALL), "layers of type recurrent"),
        (LlamaConfig(**SMALL, attention_chunk_size=4), "sets attention_chunk_size"),
    ],
    ids=["convolution", "linear", "chunked", "recurrent", "chunk-size"],
)
def test_layers_that_mix_the_sequences_of_a_row_are_refused(config: PretrainedConfig, reason: str):
    model = SimpleNamespace(config=config, _supports_attention_backend=True, set_attn_implementation=str)
    with pytest.raises(ConfigError, match=reason):
        use_packed_attention(model, "a model")


def test_attention_that_does_more_is_refused():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL))
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="sets attn_logit_softcapping"):
        use_packed_attention(model, "gemma")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GptOssConfig(**SMALL, num_local_experts=4), "knows no attention sinks"),
        (NemotronConfig(**SMALL), "NemotronAttention is not given where the sequences of a row begin"),
        (OPTConfig(vocab_size=24, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=4,
            word_embed_proj_dim=32), r"\(OPTForCausalLM\) has no `layers`"),
    ],
    ids=["sinks", "no-bounds", "no-layers"],
)  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused_as_it_is_loaded(
    config: PretrainedConfig, reason: str, tmp_path: Path
):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        LocalLearner(str(tmp_path), TrainConfig(), seed=0)
