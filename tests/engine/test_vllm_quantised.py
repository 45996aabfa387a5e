"""An int8 or fp8 engine under a learner in floats: after an update it equals one that was started with the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from http_engine import launched_engine
from nano_models import changed, logprobs_of, save_dense
from penstock.engine.layouts import quantization_config
from penstock.errors import PenstockError
from penstock.plugin.quantised import find_schemes, quantised
from penstock.settings import EngineConfig
from penstock.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, detokenize=False)
PROMPT = [8, 9, 10]


def prequantised(floats: Path, folder: Path, kind: str) -> Path:
    """A checkpoint as llm-compressor writes one."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((floats / name).read_bytes())
    config = quantization_config(kind, on_cpu=True)
    tensors = load_file(floats / "model.safetensors")
    schemes = find_schemes(config, [(name, "float32", tuple(t.shape)) for name, t in tensors.items()])
    save_file(dict(quantised(schemes, tensors.items())), folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("kind", ["int8", "fp8"])
async def test_an_update_is_quantised_on_its_way(kind, tmp_path):
    floats = save_dense(tmp_path / "floats", tied=False)
    model = changed(AutoModelForCausalLM.from_pretrained(floats, dtype="float32"), 5, scale=0.1)
    model.save_pretrained(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((floats / name).read_bytes())
    ways = {
        "updated": EngineConfig(model=str(prequantised(floats, tmp_path / "pre", kind)), profile="cpu"),
        "fresh": EngineConfig(model=str(tmp_path / "other"), profile="cpu", quantization=kind),
    }
    found = {}
    for name, config in ways.items():
        async with launched_engine(config.model_copy(update={"max_model_len": 512}), name, tmp_path) as (engine, _):
            if name == "updated":
                before = await engine.collective_rpc("penstock_checksum")
                with pytest.raises(PenstockError, match="1 tensors of the engine's model are missing"):
                    await engine.update_weights(list(tensors_of(model).items())[:-1])
                await engine.update_weights(tensors_of(model).items())
                assert await engine.collective_rpc("penstock_checksum") != before
            [sample] = await engine.sample(PROMPT, 1, GREEDY)
            found[name] = (sample.token_ids, sample.logprobs, await engine.collective_rpc("penstock_checksum"))
    assert found["updated"] == found["fresh"]
    ids, logprobs, _ = found["fresh"]
    gap = max(abs(a - b) for a, b in zip(logprobs_of(model, PROMPT, ids), logprobs, strict=True))
    assert 1e-4 < gap < 1, f"quantised, and still this model: {gap}"


def tensors_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}
