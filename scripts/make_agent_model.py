"""Make the tiny model of `examples/AGENT.yaml`: a Qwen3 of 0.8M parameters that guesses with too much care.

    python scripts/make_agent_model.py

Trains from scratch, supervised, on the warm-start ranges of `examples/tools/guess.py`. The player goes as far as the
answer says in a part of its guesses, and else one step in that direction. So the likeliest guess of the model is the
careful one, and it has to learn from rewards that the other is better. A part of the episodes has no answers.

Seeds are fixed, so that the same machine and number of threads give the same file.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

from examples.tools.guess import Guess  # noqa: E402
from make_demo_model import IGNORE, MAX_LENGTH, new_model  # noqa: E402

from char_tokenizer import save_char_tokenizer  # noqa: E402
from penstock.rollout.environment import Task  # noqa: E402

OUT = ROOT / "examples" / "models" / "guesser-0.8m"
BATCH = 64
LEARNING_RATE = 1e-3
RAMP_STEPS = 100
BOLD = 0.35
"""Share of the guesses that go as far as the answer says."""
WITHOUT = 0.2
"""Share of the episodes without answers."""


def main() -> None:
    """Make the model, print how often it finds a held-out number, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    vocabulary = save_char_tokenizer(args.out, max_length=MAX_LENGTH)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out)
    model = new_model(vocabulary, tokenizer)
    warm_start(model, tokenizer, args.steps, random.Random(args.seed))
    model.save_pretrained(args.out)
    for feedback in (True, False):
        found = success(model, tokenizer, Guess(seed=0, feedback=feedback))
        print(f"held-out numbers found, {'with' if feedback else 'without'} answers: {found:.1%}")
    print(f"wrote {args.out}")


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> None:
    """Cross-entropy on the guesses of random episodes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RAMP_STEPS, total_iters=RAMP_STEPS)
    environments = [Guess(seed=0, feedback=feedback) for feedback in (True, False)]
    started = time.perf_counter()
    model.train()
    for step in range(1, steps + 1):
        rows = [episode(environments[rng.random() < WITHOUT], tokenizer, rng) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        inputs = torch.tensor([[*ids, *[tokenizer.pad_token_id] * (width - len(ids))] for ids, _ in rows])
        labels = torch.tensor([[*labels, *[IGNORE] * (width - len(labels))] for _, labels in rows])
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s", flush=True)


def episode(environment: Guess, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """Play one episode; return its ids and labels, which are the guesses with their ends."""
    task = environment.draw("warm_start", rng)
    low, high, hidden = task.metadata["low"], task.metadata["high"], task.metadata["hidden"]
    guess = rng.randint(low, high)
    ids: list[int] = tokenizer.encode(task.prompt)
    labels = [IGNORE] * len(ids)
    for _ in range(environment.guesses):
        said = [*tokenizer.encode(f"{guess:02}"), tokenizer.eos_token_id]
        answer = environment.answer(f"{guess:02}", hidden)
        ids, labels = [*ids, *said], [*labels, *said]
        if f"{guess:02}" == hidden:
            break
        ids, labels = [*ids, *tokenizer.encode(answer)], [*labels, *[IGNORE] * len(answer)]
        if answer == "...":
            guess = rng.randint(low, high)
        else:
            guess += int(answer) if rng.random() < BOLD else (1 if int(answer) > 0 else -1)
    return ids, labels


@torch.no_grad()
def success(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, environment: Guess) -> float:
    """Share of 400 held-out numbers found by the likeliest guesses."""
    tasks: list[Task] = environment.heldout_tasks(400)
    model.eval()
    texts = {i: tokenizer.encode(task.prompt) for i, task in enumerate(tasks)}
    found = 0
    for _ in range(environment.guesses):
        going = list(texts)
        inputs = torch.tensor([texts[i] for i in going])
        for _ in range(3):
            inputs = torch.cat([inputs, model(input_ids=inputs).logits[:, -1:].argmax(-1)], dim=1)
        for i, row in zip(going, inputs.tolist(), strict=True):
            guess, hidden = tokenizer.decode(row[-3:-1]), tasks[i].metadata["hidden"]
            if guess == hidden:
                found += 1
                del texts[i]
            else:
                texts[i] = [*row, *tokenizer.encode(environment.answer(guess, hidden))]
    return found / len(tasks)


if __name__ == "__main__":
    main()
