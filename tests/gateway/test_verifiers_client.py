"""verifiers and prime-rl unchanged: their training client against our router.

The quick tests send what renderers 0.1.12 (the client of both) sends, and read the answer as it does. With
PENSTOCK_VERIFIERS_PYTHON, a Python that has verifiers 0.4.0, its own client does it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from chat_model import save_chat_tokenizer
from nano_models import logprobs_of
from penstock import Fleet, Sample, SamplingParams
from penstock.sim.tokens import Model
from penstock.types import VersionSpan
from sim_verify import verify

SIDE = Path(__file__).parents[2] / "benchmarks" / "_verifiers_side.py"
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


@pytest.mark.skipif("PENSTOCK_VERIFIERS_PYTHON" not in os.environ, reason="needs PENSTOCK_VERIFIERS_PYTHON")
async def test_verifiers_own_client_records_what_the_engines_sampled(tmp_path: Path) -> None:
    """Its interception server and training client, four sessions of three turns.

    Its rows begin a branch where a text of noise is rendered as other tokens; a turn before that is in both.
    """
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    engine = {"tokens-per-second": 500, "vocab-size": 98}
    async with Fleet.launch("sim-model", engines=2, profile="sim", max_model_len=2048, extra_args=engine) as fleet:
        words = [os.environ["PENSTOCK_VERIFIERS_PYTHON"], str(SIDE), fleet.url, "sim-model", str(tokenizer), "4", "16"]
        side = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24
        )
        assert side.stdin is not None
        assert side.stdout is not None
        try:
            async with asyncio.timeout(60):
                info = json.loads(await side.stdout.readline())
                async with httpx.AsyncClient(base_url=info["url"], timeout=60) as http:
                    sampled = sum(await asyncio.gather(*(_episode(http, key) for key in info["keys"])))
                side.stdin.write(b"rows\n")
                rows = json.loads(await side.stdout.readline())["rows"]
        finally:
            side.kill()
            await side.wait()
    contexts = {tuple(row["ids"][: i + 1]) for row in rows for i, mask in enumerate(row["mask"]) if mask}
    assert len(contexts) == sampled
    for row in rows:
        begins = [i for i, mask in enumerate(row["mask"]) if mask and not row["mask"][i - 1]]
        for begin in begins:
            end = next((i for i in range(begin, len(row["mask"])) if not row["mask"][i]), len(row["mask"]))
            ids, logprobs = row["ids"][begin:end], row["logprobs"][begin:end]
            sample = Sample(
                tuple(ids), "stop" if ids[-1] == 2 else "length", tuple(logprobs), (VersionSpan(0, 0, len(ids)),)
            )
            params = SamplingParams(max_tokens=16, stop_token_ids=(2, 0))
            assert verify(row["ids"][:begin], sample, params=params, model=Model(vocab_size=98)) == []


async def _episode(http: httpx.AsyncClient, key: str) -> int:
    """Chat over three turns; the number of sampled tokens."""
    messages: list[Any] = [{"role": "user", "content": f"hello {key[:3]}"}]
    sampled = 0
    for number in range(3):
        answer = await http.post(
            "/v1/chat/completions",
            json={"model": "any", "messages": messages},
            headers={"Authorization": f"Bearer {key}"},
        )
        assert answer.status_code == 200, answer.text
        sampled += answer.json()["usage"]["completion_tokens"]
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"more {number}"}]
    return sampled
