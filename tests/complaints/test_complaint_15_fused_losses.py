"""Complaint 15: a fused or chunked loss drifts from the plain one: trl #7063 and #7244, Liger #873."""

from __future__ import annotations

import pytest
import torch

from penstock.train import logprobs
from penstock.train.logprobs import token_logprobs

K, H, V = 48, 32, 211


def train(chunk_rows: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], float]:
    """Losses of a hundred steps on one matrix, by our function or (None) the plain one, and the last entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(K, H, generator=generator).to(dtype)
    weight = torch.nn.Parameter(torch.randn(V, H, generator=generator) / H**0.5)
    targets = torch.randint(V, (K,), generator=generator)
    advantages = torch.randn(K, generator=generator)
    optimizer = torch.optim.AdamW([weight], lr=1e-2)
    losses: list[float] = []
    entropy = torch.zeros(())
    for _ in range(100):
        optimizer.zero_grad()
        if chunk_rows is None:
            logits = torch.log_softmax((hidden @ weight.to(dtype).t()).float() / 0.8, -1)
            found = logits.gather(-1, targets[:, None]).squeeze(-1)
            entropy = -(logits.exp() * logits).sum(-1).mean()
        else:
            monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk_rows * V)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                found, entropies = token_logprobs(hidden, weight, targets, 0.8)
            entropy = entropies.mean()
        loss = -(advantages * found).clamp(max=20).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, float(entropy.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hundred_steps_by_chunks_are_those_of_the_plain_loss(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of chunks in bf16 lose entropy within dozens of steps, while each step looks right."""
    want, want_entropy = train(None, dtype, monkeypatch)
    for rows in (7, 1000):
        losses, entropy = train(rows, dtype, monkeypatch)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        assert losses == pytest.approx(want, rel=tolerance, abs=tolerance)
        assert entropy == pytest.approx(want_entropy, rel=tolerance)
