"""Nano checkpoints built on the spot, and the transformers forward that engines are held against."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from char_tokenizer import save_char_tokenizer
from penstock.control_types import UpdateReport
from penstock.types import Sample

MAX_LEN = 2048  # answers long enough that an update, however late on a busy machine, meets them
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's CPU attention has
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_dense(folder: Path, *, tied: bool = True) -> Path:
    """A Qwen3 of 0.1M random parameters, with a character tokenizer."""
    return _saved(folder, Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=tied)


def save_moe(folder: Path) -> Path:
    """A Qwen3-MoE with four experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return _saved(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig, decoder_sparse_step=1, mlp_only_layers=[], **experts)


def save_biased(folder: Path) -> Path:
    """A Qwen2: its queries, keys and values have biases."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # its heads share its width
    return _saved(folder, Qwen2ForCausalLM, Qwen2Config, **heads)


def save_routed(folder: Path) -> Path:
    """A GLM-4 MoE: its router adds a bias to the scores of its four experts, and there is one that all tokens take."""
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    more = {"first_k_dense_replace": 0, "attention_bias": True, "use_qk_norm": True}
    return _saved(folder, Glm4MoeForCausalLM, Glm4MoeConfig, **experts, **more)


def _saved(folder: Path, model: Any, config: Any, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = save_char_tokenizer(folder, max_length=MAX_LEN)
    made = config(**{"vocab_size": vocab, "tie_word_embeddings": False, **SHAPE, **options})
    _randomise(model(made)).save_pretrained(folder)
    return folder


ADAPTED = {"q_proj": (64, 128), "o_proj": (128, 64)}
"""Projections of each layer that `save_adapter` changes, with what goes in and comes out."""


ADAPTER_CONFIG = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(ADAPTED), "bias": "none",
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "",
}  # fmt: skip


def adapter_tensors(seed: int = 3) -> dict[str, torch.Tensor]:
    """A LoRA adapter of rank 8 for `save_dense` under PEFT's names, large enough to change every answer."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, (inner, outer) in ADAPTED.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(8, inner, generator=generator) * 0.2
            tensors[f"{key}B.weight"] = torch.randn(outer, 8, generator=generator) * 0.2
    return tensors


def save_adapter(folder: Path, seed: int = 3) -> Path:
    """`adapter_tensors` as PEFT saves them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_tensors(seed), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    return folder


def merged(model: Any, adapter: Path | dict[str, torch.Tensor]) -> Any:
    """A copy with the adapter added to its weights, scaled by alpha / rank."""
    other = copy.deepcopy(model)
    tensors = adapter if isinstance(adapter, dict) else load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for number, layer in enumerate(other.model.layers):
            for name in ADAPTED:
                key = f"base_model.model.model.layers.{number}.self_attn.{name}.lora_"
                weight = getattr(layer.self_attn, name).weight
                weight += 16 / 8 * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
    return other


def _randomise(model: Any, seed: int = 0) -> Any:
    """Weights large enough that other weights give clearly other logprobs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
    return model


def changed(model: Any, seed: int, scale: float = 0.02) -> Any:
    """A copy with every weight moved a little."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return other


def taught(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Any:
    """A copy that answers `prompt` with `response`, greedily and with probabilities that tell its tokens apart."""
    other = copy.deepcopy(model)
    ids = torch.tensor([[*prompt, *response]])
    optimizer = torch.optim.Adam(other.parameters(), lr=2e-3)
    for _ in range(400):
        loss = torch.nn.functional.cross_entropy(other(ids).logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])
        if loss.item() < 0.05:
            return other
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the nano model did not learn its answer: loss {loss.item()}")


@torch.no_grad()
def logprobs_of(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Logprob of each response token under `model`, by one transformers forward in fp32."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()


@dataclass
class History:
    """Every version an engine (or fleet) has served in this test run, as transformers models."""

    models: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Begin with the checkpoint that engines load as version 0."""
        return cls({0: AutoModelForCausalLM.from_pretrained(path, dtype="float32")})

    @property
    def latest(self) -> Any:
        return self.models[max(self.models)]

    async def update(self, engine: Any, seed: int) -> UpdateReport:
        """Move the newest weights a little, give them to an engine or a fleet, and remember them."""
        model = changed(self.latest, seed)
        report = await engine.update_weights(model.named_parameters())
        self.models[report.version] = model
        return report

    def worst_difference(self, prompt: Sequence[int], sample: Sample, shift: int = 0) -> float:
        """Largest |engine - recomputed| over the tokens, each under its claimed version (or `shift` versions on)."""
        assert sample.logprobs is not None
        assert len(sample.versions()) == len(sample.token_ids) == len(sample.logprobs)
        again = self.replayed(prompt, sample, shift)
        return max((abs(a - b) for a, b in zip(again, sample.logprobs, strict=True)), default=0.0)

    def unseen(self, prompt: Sequence[int], sample: Sample) -> int:
        """How many of its spans could begin or end one token off without a difference; chance has it for few."""
        found = 0
        for left, right in pairwise(sample.spans):
            for place, wrong in ((left.end, left.version), (left.end - 1, right.version)):
                moved = logprobs_of(self.models[wrong], prompt, sample.token_ids)[place]
                found += abs(moved - sample.logprobs[place]) < 1e-4
        return found

    @torch.no_grad()
    def replayed(self, prompt: Sequence[int], sample: Sample, shift: int = 0) -> list[float]:
        """Logprobs of a sample by the models that its spans claim. A span that kept its KV goes on with what is there:
        its update is repeated at its first token, when all tokens before the last one had KV."""
        ids, cache, logprobs = torch.tensor([[*prompt, *sample.token_ids]]), None, []
        for span in sample.spans:
            model, begin, end = self.models[span.version + shift], len(prompt) + span.start - 1, len(prompt) + span.end
            if cache is None or not span.kv_kept:
                cache = DynamicCache()
                if begin:
                    model(ids[:, :begin], past_key_values=cache)
            assert cache.get_seq_length() == begin
            logits = model(ids[:, begin : end - 1], past_key_values=cache).logits[0]
            logprobs += logits.log_softmax(-1).gather(1, ids[0, begin + 1 : end, None])[:, 0].tolist()
        return logprobs


def state_of(learner: Any, adapter: str | None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a learner's `save` writes and returns, copied."""
    base = {} if adapter is None else {"base": learner._fingerprint()}
    tensors = {name: tensor.detach().clone() for name, tensor in learner._state(adapter).items()}
    return tensors, {"version": learner.versions[adapter], **base}
