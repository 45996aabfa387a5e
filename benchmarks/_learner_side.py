"""One side of `learner.py` in a process of its own: a learner that makes a step whenever it is asked to.

    python benchmarks/_learner_side.py SIDE MODEL SEQUENCES TOKENS LORA
    python benchmarks/_learner_side.py save MODEL               weights at random for a folder with a config

It reads a line for each step and answers with one JSON line: seconds, and the most memory of the GPU that PyTorch had
allocated in that step. The sides:

- `penstock`: `penstock.train.learner.Learner`.
- `script`: the thirty lines that a researcher writes: transformers, compiled layers, recompute, autocast to bf16,
  logprobs in chunks, fused AdamW. Packed sequences use `varlen_attn`.
- `fsdp`: transformers' own forward with its logits, under FSDP2 with bf16 parameters, recompute, not compiled.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

ROWS = 2048
"""Rows of logits that exist at once in `script`."""
PROMPT = 8
LEARNING_RATE = 1e-6
CLIP = (0.8, 1.28)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save_random(path: Path) -> None:
    """Give a folder of a config weights at random, once: every side loads the same."""
    if not list(path.glob("*.safetensors")):
        torch.manual_seed(0)
        with DEVICE:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        model.save_pretrained(path)


def draw(vocabulary: int, sequences: int, tokens: int) -> Tensor:
    """Token ids `[sequences, tokens + 1]`: every side reads the first `tokens` of each and predicts the last."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (sequences, tokens + 1), generator=generator)


def clipped_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped objective, the mean over the tokens."""
    ratio = (logprobs - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(*CLIP) * advantages).mean()


# --- the plain script ------------------------------------------------------------------------------------------------


def varlen(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, None]:
    """Attend within packed sequences, as transformers calls it."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - GPUs only

    del mask
    groups = module.num_key_value_groups
    query, key, value = (part[0].transpose(0, 1).bfloat16() for part in (query, key, value))
    causal: dict[str, Any] = {"window_size": (-1, 0)}
    if "is_causal" in inspect.signature(varlen_attn).parameters:  # torch 2.11
        causal = {"is_causal": True}
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    bounds, longest = given["cu_seq_lens_q"], given["max_length_q"]
    return varlen_attn(query, key, value, bounds, bounds, longest, longest, **causal).unsqueeze(0), None  # pyright: ignore[reportAttributeAccessIssue] - no lse is asked for


def chunk_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logprobs of a few rows; the logits are made again in the backward pass."""
    logits = (hidden @ weight.t()).float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def script(path: Path, ids: Tensor, lora: int) -> Callable[[], None]:
    """Build what a researcher writes, and return its step."""
    model = load(path, lora, torch.bfloat16 if lora else torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if DEVICE.type == "cuda":
        for layer in base(model).model.layers:
            layer.compile()
    inputs, targets = ids[:, :-1].reshape(1, -1).to(DEVICE), ids[:, 1:].reshape(-1).to(DEVICE)
    sequences, tokens = len(ids), ids.shape[1] - 1
    packing: dict[str, Any] = {}
    if sequences > 1:
        if DEVICE.type == "cuda":
            AttentionInterface.register("varlen", varlen)
            base(model).set_attn_implementation("varlen")
            bounds = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * tokens
            packing = {"cu_seq_lens_q": bounds, "max_length_q": tokens}
        packing["position_ids"] = torch.arange(tokens, device=DEVICE).repeat(sequences).unsqueeze(0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=DEVICE.type == "cuda")
    behaviour, advantages = terms(targets)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            hidden = base(model).model(inputs, use_cache=False, **packing).last_hidden_state[0]
            weight = base(model).lm_head.weight
            parts = [
                checkpoint(chunk_logprobs, part, weight, wanted, use_reentrant=False)
                for part, wanted in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
            ]
        clipped_loss(torch.cat(parts), behaviour, advantages).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


def load(path: Path, lora: int, dtype: torch.dtype = torch.float32) -> Any:
    """Load the model, with adapters of peft in fp32 where `lora` is a rank."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(DEVICE)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - of the extra `train`

    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"))


def base(model: Any) -> Any:
    """Return the causal model within peft's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def terms(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return behaviour logprobs and advantages that give gradients of both signs."""
    behaviour = torch.full((len(targets),), -11.9, device=targets.device)
    return behaviour, torch.ones_like(behaviour).where(targets % 2 == 0, -1.0)


# --- transformers under FSDP2 ----------------------------------------------------------------------------------------


def fsdp(path: Path, ids: Tensor, lora: int) -> Callable[[], None]:
    """Build the plain FSDP2 loop, and return its step."""
    import torch.distributed as dist  # noqa: PLC0415 - one side's
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - torch does not name it in __all__
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    model = load(path, lora)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in base(model).model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=DEVICE.type == "cuda")
    inputs, targets = ids[:, :-1].to(DEVICE), ids[:, 1:].to(DEVICE)
    behaviour, advantages = terms(targets.reshape(-1))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(inputs, use_cache=False).logits.float()
        logprobs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).reshape(-1)
        clipped_loss(logprobs, behaviour, advantages).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


# --- ours ------------------------------------------------------------------------------------------------------------


def penstock(path: Path, ids: Tensor, lora: int) -> Callable[[], None]:
    """Build the learner as `penstock train` does, and return its step."""
    from penstock.config import TrainConfig  # noqa: PLC0415 - one side's
    from penstock.train.interface import AdamSpec, Datum, LoraSpec  # noqa: PLC0415
    from penstock.train.learner import LocalLearner  # noqa: PLC0415
    from penstock.train.losses import LossSpec  # noqa: PLC0415

    on_gpu = DEVICE.type == "cuda"
    values = {
        "dtype": "bfloat16",
        "recompute": "selective",
        "compile": on_gpu,
        "micro_batch_tokens": ids[:, 1:].numel(),
    }
    config = TrainConfig.model_validate({**values, "lora": {"rank": lora, "alpha": 2 * lora} if lora else None})
    learner = LocalLearner(str(path), config, seed=0)
    adapter = "a" if lora else None
    if adapter is not None:
        learner.create_adapter(adapter, LoraSpec(rank=lora, alpha=2 * lora))
    tokens = ids.shape[1] - 1
    inputs, targets = ids[:, :-1], ids[:, 1:]
    behaviour, advantages = terms(targets.reshape(-1))
    of_each = zip(inputs, targets, behaviour.split(tokens), advantages.split(tokens), strict=True)
    data = [
        Datum(read.tolist(), made.tolist(), [1.0] * tokens, mu.tolist(), a.tolist()) for read, made, mu, a in of_each
    ]
    adam = AdamSpec(LEARNING_RATE, grad_clip_norm=1.0)

    def step() -> None:
        outputs = learner.forward_backward(adapter, LossSpec({"dapo": 1.0}), data)
        learner.optim_step(adapter, adam, scale=1 / outputs.denominators["dapo"])

    return step


def main() -> None:
    """Answer each line with a step."""
    transformers.utils.logging.disable_progress_bar()
    side, path = sys.argv[1], Path(sys.argv[2])
    if side == "save":
        save_random(path)
        return
    sequences, tokens, lora = map(int, sys.argv[3:])
    ids = draw(AutoConfig.from_pretrained(path).vocab_size, sequences, tokens)
    step = {"penstock": penstock, "script": script, "fsdp": fsdp}[side](path, ids, lora)
    for _ in sys.stdin:
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        gib = 0.0
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            gib = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps({"seconds": time.perf_counter() - began, "gib": gib}), flush=True)


if __name__ == "__main__":
    main()
