"""A real vLLM CPU engine with an adapter: an update changes what lies under it, and nothing of it."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from transformers import AutoModelForCausalLM

from http_engine import HTTPEngine
from nano_models import changed, logprobs_of, merged, save_adapter
from penstock.engine.launch import EngineProcess
from penstock.settings import EngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_an_adapter_is_added_to_the_weights_in_force(nano_path: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    first = AutoModelForCausalLM.from_pretrained(nano_path, dtype="float32")
    config = EngineConfig(model=str(nano_path), profile="cpu", max_model_len=512, enable_lora=True)
    process = await EngineProcess.launch(config, name="adapted", log_dir=tmp_path)
    engine = await HTTPEngine.connect(process.url, name="adapted")
    try:
        body = {"lora_name": "ad", "lora_path": str(adapter)}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{process.url}/v1/load_lora_adapter", json=body, timeout=aiohttp.ClientTimeout(60)) as answer,
        ):
            assert answer.status == 200, await answer.text()
        for model in (first, changed(first, 4)):
            if model is not first:
                await engine.update_weights(model.named_parameters())
            assert await _worst(engine, str(nano_path), model) < 1e-4
            assert await _worst(engine, "ad", merged(model, adapter)) < 1e-4
            assert await _worst(engine, "ad", model) > 0.1, "the adapter changes nothing"
    finally:
        await engine.teardown()
        await process.stop()


async def _worst(engine: HTTPEngine, name: str, model: object) -> float:
    """Largest difference between what the engine says of its own answer and what the model says of it."""
    prompt = [5, 6, 7]
    body = {
        "model": name, "prompt": prompt, "max_tokens": 30, "temperature": 0, "logprobs": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    choice = (await engine.completion(body))["choices"][0]
    again = logprobs_of(model, prompt, choice["token_ids"])
    return max(abs(a - b) for a, b in zip(again, choice["logprobs"]["token_logprobs"], strict=True))
