"""The facade over a real vLLM CPU engine: its outputs are those of the model, its timeout stops the scheduler."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_models import changed, logprobs_of
from penstock import AsyncVLLM

pytest.importorskip("vllm")

from vllm import SamplingParams, TokensPrompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def service(nano_path, hold):
    options = {"profile": "cpu", "max_model_len": 512, "enable_lora": True, "extra_args": hold.extra_args}
    with AsyncVLLM.from_pretrained(nano_path, **options) as service:
        yield service


@pytest.fixture(scope="module")
def model(nano_path):
    return AutoModelForCausalLM.from_pretrained(nano_path, dtype="float32")


@torch.no_grad()
def distribution(model, ids):
    """Logprobs of the next token after each of `ids`, `[T, V]`."""
    return model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)


@pytest.mark.each
def test_text_ids_and_logprobs_are_the_models(service, model):
    out = service.generate("12 34", GREEDY)
    sample = out.outputs[0]
    assert out.prompt == "12 34"
    assert list(out.prompt_token_ids) == service.get_tokenizer().encode("12 34")
    assert sample.text == service.get_tokenizer().decode(sample.token_ids)
    assert len(sample.token_ids) == 12
    table = distribution(model, [*out.prompt_token_ids, *sample.token_ids])[len(out.prompt_token_ids) - 1 : -1]
    for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        values, order = table[i].topk(3)
        assert token == order[0]
        assert list(entry) == order.tolist()
        assert [lp.rank for lp in entry.values()] == [1, 2, 3]
        assert [lp.logprob for lp in entry.values()] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry[token].decoded_token == service.get_tokenizer().decode([token], skip_special_tokens=False)
    chosen = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(chosen))
    by_ids = service.generate(TokensPrompt(prompt_token_ids=out.prompt_token_ids), GREEDY)
    assert by_ids.outputs[0].token_ids == sample.token_ids


def test_prompt_logprobs(service, model):
    ids = [9, 8, 7, 6, 5, 20, 30]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    out = service.generate(prompt_token_ids=ids, sampling_params=params)
    assert out.prompt_logprobs[0] is None
    told = [entry[token].logprob for token, entry in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
    assert told == pytest.approx(logprobs_of(model, ids[:1], ids[1:]), abs=1e-4)
    assert out.outputs[0].text == ""


def test_a_grammar_is_followed(service):
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["12", "345"]))
    outs = service.generate(["1"] * 6, params)
    assert {out.outputs[0].text for out in outs} <= {"12", "345"}


def test_new_weights_as_torchrls_updater_brings_them(service, model):
    assert service.fleet.dtype == "float32"
    metadata = service.get_model_metadata()
    other = changed(model, 4)
    brought = dict(other.named_parameters())
    assert {name: metadata[name] for name in brought} == {n: (p.dtype, p.shape) for n, p in brought.items()}
    service.init_weight_update_group()
    report = service.update_weights(iter(brought.items()))
    assert report.version == 1
    out = service.generate("12 34", GREEDY)
    sample = out.outputs[0]
    told = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert told == pytest.approx(logprobs_of(other, out.prompt_token_ids, sample.token_ids), abs=1e-4)
    assert [(span.version, span.start, span.end) for span in sample.weight_versions] == [("1", 0, 12)]
