"""Make the tiny model of the demo: a Qwen3 of 0.8M parameters that has half learned to sort.

    python scripts/make_demo_model.py

Trains from scratch, supervised, on the warm-start split of reasoning-gym's number_sorting in its compact form
(`<56 25 75=` is answered by `25 56 75`), until about 40% of new tasks are answered exactly: enough for rewards to come
in, and much left for reinforcement learning.

The batches are small and the learning rate constant because of what comes after. Weights of the same accuracy from
batches of 64 to 128 and a rate that falls to 0 gained 1 to 7 points of greedy accuracy in 80 steps of reinforcement
learning; these gain 26 to 30.

Seeds are fixed, so that the same machine and number of threads give the same file. About 40 s on two idle cores.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from char_tokenizer import save_char_tokenizer
from penstock.rollout.environment import Task
from penstock.rollout.reasoning_gym_env import ReasoningGymEnvironment

OUT = Path(__file__).parent.parent / "examples" / "models" / "sorter-0.8m"
DATASET = {
    "dataset": "number_sorting",
    "compact": True,
    "min_numbers": 3,
    "max_numbers": 5,
    "min_value": 0,
    "max_value": 99,
    "min_decimals": 0,
    "max_decimals": 0,
}
MAX_LENGTH = 512
BATCH = 16
LEARNING_RATE = 1e-3
RAMP_STEPS = 160
WINDOW = 64
"""Batches over which the training accuracy is averaged: 1024 tasks."""
IGNORE = -100


def main() -> None:
    """Make the model, print its held-out accuracy before and after, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--until", type=float, default=0.35, help="accuracy on new warm-start tasks at which to stop")
    parser.add_argument("--heldout", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    vocab_size = save_char_tokenizer(args.out, max_length=MAX_LENGTH)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    environment = ReasoningGymEnvironment(seed=args.seed, **DATASET)
    heldout = environment.heldout_tasks(args.heldout)
    model = new_model(vocab_size, tokenizer)
    print(f"{model.num_parameters():,} parameters, vocabulary {vocab_size}")

    before = greedy_accuracy(model, tokenizer, environment, heldout)
    warm_start(model, tokenizer, environment, until=args.until)
    after = greedy_accuracy(model, tokenizer, environment, heldout)
    model.save_pretrained(args.out)
    print(f"held-out greedy exact accuracy, n={len(heldout)}: {before:.1%} before, {after:.1%} after; wrote {args.out}")


def new_model(vocab_size: int, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights. Tied embeddings, as the small models of the family have them."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    # The whole of it: vLLM takes default sampling parameters from here.
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, environment: ReasoningGymEnvironment, *, until: float
) -> None:
    """Cross-entropy on the answers, never the same task twice, until `until` of the last 1024 tasks came out right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RAMP_STEPS, total_iters=RAMP_STEPS)
    recent: collections.deque[float] = collections.deque(maxlen=WINDOW)
    started = time.perf_counter()
    model.train()
    for step in itertools.count(1):
        tasks = [environment.warm_start_task((step - 1) * BATCH + i) for i in range(BATCH)]
        inputs, labels = supervised_batch(tasks, tokenizer)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        labels = labels[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        # Greedy decoding gives the answer exactly where every token of it is the likeliest after those before it.
        right = (logits.argmax(-1) == labels) | (labels == IGNORE)
        recent.append(right.all(-1).float().mean().item())
        accuracy = statistics.fmean(recent)
        done = len(recent) == WINDOW and accuracy >= until
        if done or step % 100 == 0:
            elapsed = time.perf_counter() - started
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.1%}, {elapsed:.0f} s", flush=True)
        if done:
            return


def supervised_batch(tasks: list[Task], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, right-padded; only the answer and its end are learned."""
    prompts = [tokenizer.encode(task.prompt) for task in tasks]
    answers = [[*tokenizer.encode(task.metadata["answer"]), tokenizer.eos_token_id] for task in tasks]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    inputs = torch.full((len(tasks), width), tokenizer.pad_token_id)
    labels = torch.full((len(tasks), width), IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        inputs[row, :end] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return inputs, labels


def greedy_accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: ReasoningGymEnvironment,
    tasks: list[Task],
) -> float:
    """Fraction of the tasks answered exactly by greedy decoding."""
    tokenizer.padding_side = "left"
    inputs = tokenizer([task.prompt for task in tasks], return_tensors="pt", padding=True)
    outputs = model.eval().generate(**inputs, max_new_tokens=24, do_sample=False)
    texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(environment.reward(task, text) for task, text in zip(tasks, texts, strict=True)) / len(tasks)


if __name__ == "__main__":
    main()
