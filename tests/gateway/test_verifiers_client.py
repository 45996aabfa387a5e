"""verifiers and prime-rl unchanged: their training client against our router.

They send what renderers 0.1.12 (the client of both) sends, and read the answer as it does; the client itself is driven
by benchmarks/gateway.py.
"""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from nano_models import logprobs_of
from penstock import Fleet, Sample, SamplingParams
from penstock.sim.tokens import Model
from penstock.types import VersionSpan
from sim_verify import verify

PROMPT = [5, 6, 7, 8]
NO_EVIDENCE = -9999.0
"""vLLM's logprob of a token without one; the client refuses it."""


async def generate(
    http: httpx.AsyncClient, model: str, prompt: list[int], **more: Any
) -> tuple[list[int], list[float]]:
    """One turn as the client makes it; ids and logprobs, checked as the client does."""
    sampling = {"max_tokens": 12, "temperature": 1.0, "routed_experts_prompt_start": 0, **more}
    sampling |= {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    answer = await http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "a-rollout"})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    logprobs = [entry["logprob"] for entry in content]
    assert all(math.isfinite(value) and value != NO_EVIDENCE for value in logprobs)
    assert choice["finish_reason"] in {"stop", "length"}
    assert answer.json()["request_id"]
    return choice["token_ids"], logprobs


async def length_of(http: httpx.AsyncClient, model: str) -> int:
    """The context length, by which the client refuses prompts that are too long."""
    cards = (await http.get("/v1/models")).json()["data"]
    return next(card["max_model_len"] for card in cards if card["id"] == model)


async def test_the_router_answers_the_training_client_of_verifiers() -> None:
    async with (
        Fleet.launch("sim-model", engines=2, profile="sim", max_model_len=512) as fleet,
        httpx.AsyncClient(base_url=fleet.url, timeout=60) as http,
    ):
        assert await length_of(http, "sim-model") == 512
        ids, logprobs = await generate(http, "sim-model", PROMPT, seed=1)
        params = SamplingParams(max_tokens=12, seed=1, stop_token_ids=(2,))
        sample = Sample(tuple(ids), "length", tuple(logprobs), (VersionSpan(0, 0, len(ids)),))
        assert verify(PROMPT, sample, params=params, model=Model(vocab_size=1024)) == []


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_a_real_engine_answers_the_training_client_of_verifiers(live: Any) -> None:
    headers = {"Authorization": f"Bearer {live.key}"}
    async with httpx.AsyncClient(base_url=live.engine.control.url, timeout=120, headers=headers) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        assert await length_of(http, model) == 1024
        ids, logprobs = await generate(http, model, PROMPT)
    again = logprobs_of(live.history.models[live.engine.weight_version], PROMPT, ids)
    assert logprobs == pytest.approx(again, abs=1e-4)
