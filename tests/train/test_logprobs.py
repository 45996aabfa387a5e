from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.train import logprobs
from penstock.train.logprobs import token_logprobs

K, H, V = 37, 16, 101


def samples(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, output matrix, targets, and what the gradient of each logprob is multiplied by."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(K, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (K,), generator=generator), torch.randn(K, generator=generator)


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_values_and_gradients_are_those_of_log_softmax(
    rows: int, temperature: float, bonus: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * V)
    hidden, weight, targets, slope = samples(torch.float64)
    found = token_logprobs(hidden, weight, targets, temperature)
    loss = (found.logprobs * slope).sum()
    (loss + bonus * (found.entropy * slope).sum() if bonus else loss).backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    every_K_V = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    want = every_K_V.gather(-1, targets[:, None]).squeeze(-1)
    entropy = -(every_K_V.exp() * every_K_V).sum(-1)
    ((want + bonus * entropy) * slope).sum().backward()
    torch.testing.assert_close(found.logprobs, want)
    torch.testing.assert_close(found.entropy, entropy)
    torch.testing.assert_close(gradients, (hidden.grad, weight.grad))


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_several_targets_of_a_row_are_those_of_as_many_rows(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * V)
    hidden, weight, _, _ = samples(torch.float64)
    rows_M = torch.repeat_interleave(torch.arange(K), torch.arange(K) % 4)  # of some rows none
    generator = torch.Generator().manual_seed(1)
    targets_M = torch.randint(5, (len(rows_M),), generator=generator)  # so few that a row has one twice
    slope_M = torch.randn(len(rows_M), generator=generator)
    results: list[tuple[Tensor, ...]] = []
    for found in (
        token_logprobs(hidden, weight, targets_M, 0.7, rows_K=rows_M),
        token_logprobs(hidden[rows_M], weight, targets_M, 0.7),
    ):
        ((found.logprobs + 0.3 * found.entropy) * slope_M).sum().backward()
        results.append((found.logprobs, found.entropy, hidden.grad.clone(), weight.grad.clone()))
        hidden.grad = weight.grad = None
    torch.testing.assert_close(*results)
    assert len(token_logprobs(hidden[:0], weight, targets_M[:0], 1.0).logprobs) == 0


@pytest.mark.slow
def test_compiled_chunks_are_those_of_eager_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 10 * V)  # the last chunk is shorter
    results: list[tuple[Tensor, ...]] = []
    for fuse in (False, True):
        hidden, weight, targets, slope = samples()
        found = token_logprobs(hidden, weight, targets, 0.7, fuse=fuse)
        ((found.logprobs + found.entropy) * slope).sum().backward()
        results.append((found.logprobs, found.entropy, hidden.grad, weight.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)  # sums in another order


def test_sums_over_chunks_are_in_fp32(monkeypatch: pytest.MonkeyPatch):
    """In bf16 a sum over chunks would lose what is small beside what it holds already."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", V)
    hidden, weight, targets, _ = samples(torch.bfloat16)
    found = token_logprobs(hidden, weight, targets, 1.0)
    found.logprobs.sum().backward()
    wide_hidden, wide = hidden.detach().double(), weight.detach().double()
    logits_K_V = (hidden.detach() @ weight.detach().t()).double()
    slope_K_V = torch.nn.functional.one_hot(targets, V) - logits_K_V.softmax(-1)
    want = slope_K_V.bfloat16().double().t() @ wide_hidden
    assert found.logprobs.dtype == torch.float32
    error = (weight.grad.double() - want).abs().max() / want.abs().max()
    assert error < 2**-8, error  # of the last rounding to bf16
    assert wide.isfinite().all()


def test_torchs_own_chunked_function_agrees():
    """`linear_cross_entropy` of torch 2.13; an older torch has none."""
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch before 2.13")
    hidden, weight, targets, _ = samples()
    want = -torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(token_logprobs(hidden, weight, targets, 1.0).logprobs, want, rtol=1e-5, atol=1e-5)


def test_what_needs_no_gradient_gets_none():
    hidden, weight, targets, _ = samples()
    token_logprobs(hidden, weight.detach(), targets, 1.0).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
