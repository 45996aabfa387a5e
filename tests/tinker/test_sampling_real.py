"""Samples of a real vLLM CPU engine, as the SDK gets them: logprobs are the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tinker_rig import Rig, rig

from penstock import Fleet

if TYPE_CHECKING:
    from conftest import LiveEngine

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("shared_fleet"), pytest.mark.timeout(600)]
PROMPT = [5, 6, 7, 8, 9]
NEAR = 1e-3


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()


@torch.no_grad()
def scores(model: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of the next token at each place, `[len(tokens), vocabulary]`."""
    return (model(torch.tensor([tokens])).logits[0].float() / temperature).log_softmax(-1)


async def drawn(service: Rig, sampler: str, seq: int, seed: int, samples: int) -> list[tuple[list[int], list[float]]]:
    params = {"max_tokens": 12, "seed": seed, "temperature": 0.7, "stop": []}
    body = {"num_samples": samples, "sampling_params": params, "prompt": {"chunks": [{"tokens": PROMPT}]}}
    return [(ids(s.tokens), floats(s.logprobs)) for s in (await service.sample(sampler, seq, **body)).sequences]


async def test_logprobs_and_seeds_are_those_that_the_sdk_expects(live: LiveEngine, tmp_path: Path) -> None:
    model = live.history.latest
    async with (
        Fleet.connect([live.process.url], api_key=live.key) as fleet,
        rig(tmp_path, fleet=fleet.url) as service,
    ):
        sampler = await service.sampler(await service.session())
        together = await drawn(service, sampler, 1, 5, 3)
        apart = [(await drawn(service, sampler, 2 + i, 5 + i, 1))[0] for i in range(3)]
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in apart]
        for tokens, logprobs in together:
            whole = scores(model, [*PROMPT, *tokens], 0.7)[len(PROMPT) - 1 : -1]
            assert logprobs == pytest.approx(whole[range(len(tokens)), tokens].tolist(), abs=NEAR)

        asked = {
            "prompt": {"chunks": [{"tokens": PROMPT[:2]}, {"tokens": PROMPT[2:]}]}, "prompt_logprobs": True,
            "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "sampling_params": {"max_tokens": 4, "stop": []},
        }  # fmt: skip
        found = await service.sample(sampler, 10, **asked)
        expected = scores(model, PROMPT)
        prompt = floats(found.prompt_logprobs)
        assert np.isnan(prompt[0])
        assert prompt[1:] == pytest.approx(expected[range(4), PROMPT[1:]].tolist(), abs=NEAR)
        top = found.topk_prompt_logprobs
        assert (top.k, top.length) == (3, 5)
        best = expected[:4].topk(3)
        assert floats(top.logprobs)[3:] == pytest.approx(best.values.flatten().tolist(), abs=NEAR)
        assert floats(top.logprobs)[:3] == [-99999.0] * 3
        (sequence,) = found.sequences
        after = scores(model, [*PROMPT, *ids(sequence.tokens)])[len(PROMPT) - 1 : -1].topk(2)
        assert (sequence.topk_sampled_logprobs.k, sequence.topk_sampled_logprobs.length) == (2, 4)
        given = floats(sequence.topk_sampled_logprobs.logprobs)
        assert given == pytest.approx(after.values.flatten().tolist(), abs=NEAR)

        last = await service.sample(sampler, 11, **{**asked, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 0})
        assert np.isnan(floats(last.prompt_logprobs)).tolist() == [True, True, True, False, False]
        assert floats(last.prompt_logprobs)[3:] == pytest.approx(prompt[3:], abs=NEAR)

        greedy = {"max_tokens": 8, "temperature": 0.0}
        (plain,) = (await service.sample(sampler, 12, sampling_params={**greedy, "stop": []})).sequences
        stop = ids(plain.tokens)[3]
        (cut,) = (await service.sample(sampler, 13, sampling_params={**greedy, "stop": [stop]})).sequences
        assert ids(cut.tokens) == ids(plain.tokens)[: ids(plain.tokens).index(stop) + 1]
        assert (cut.stop_reason, plain.stop_reason) == (0, 1)
        failed = await service.sample(sampler, 14, sampling_params={"max_tokens": 100_000})
        assert failed["category"] == "user"
