"""Prompts and sampling parameters of the facade, without engines."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from penstock import AsyncVLLM
from penstock.errors import ConfigError, EngineError, RequestError
from penstock.facade.forms import (
    Prompt,
    changed_fields,
    completion_fields,
    launch_options,
    model_metadata,
    prompts_of,
    request_output,
)
from penstock.settings import EngineConfig


@pytest.mark.parametrize("served", ["bfloat16", "float32"])
def test_metadata_has_the_dtype_that_the_engines_compute_in(served, nano_path):
    """Whatever devices this machine has: under Ray engines run on others."""
    metadata = model_metadata(EngineConfig(model=str(nano_path)), served)
    assert {str(dtype) for dtype, _ in metadata.values()} == {f"torch.{served}"}
    assert len(metadata) > 10


@pytest.mark.parametrize(
    ("prompts", "ids", "expected", "batch"),
    [
        ("text", None, [("text", None)], False),
        ([1, 2], None, [(None, [1, 2])], False),
        (None, [1, 2], [(None, [1, 2])], False),
        (None, [[1, 2]], [(None, [1, 2])], True),
        (["a", "b"], None, [("a", None), ("b", None)], True),
        ({"prompt_token_ids": [3]}, None, [(None, [3])], False),
        ([{"prompt": "a"}, [7], "b"], None, [("a", None), (None, [7]), ("b", None)], True),
        ({"prompt": "a", "prompt_token_ids": [5]}, None, [("a", [5])], False),
    ],
)
def test_prompts_of_every_form(prompts, ids, expected, batch):
    items, several = prompts_of(prompts, ids)
    assert [(p.text, p.ids) for p in items] == expected
    assert several is batch


@pytest.mark.parametrize(
    ("prompts", "ids", "says"),
    [
        (None, None, "neither"),
        ("a", [1], "both"),
        ([], None, "empty"),
        ([[]], None, r"prompts\[0\]"),
        (None, [[1], "a", 2.5], r"prompt_token_ids\[2\]"),
        (3, None, "int"),
        ([True, 1], None, r"prompts\[0\] is True"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, None, "multi_modal_data"),
    ],
)
def test_other_prompts_are_refused(prompts, ids, says):
    with pytest.raises(RequestError, match=says):
        prompts_of(prompts, ids)


def test_sampling_parameters_are_taken_over_as_vllm_reads_them():
    """vLLM's own reader of the body makes the same SamplingParams of it."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    params = SamplingParams(
        n=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=7, stop=["a", "b"], stop_token_ids=[4], max_tokens=9,
        min_tokens=2, logprobs=3, prompt_logprobs=1, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={5: 1.5},
        repetition_penalty=1.1, skip_special_tokens=False, include_stop_str_in_output=True, bad_words=["c"],
        ignore_eos=True, allowed_token_ids=[5, 6], extra_args={"mine": 1},
        structured_outputs=StructuredOutputsParams(regex="[ab]+"),
    )  # fmt: skip
    body = completion_fields(params)
    again = CompletionRequest(prompt="a", **body).to_sampling_params(body["max_tokens"], {"temperature": 0.1})
    for name in SamplingParams.__struct_fields__:
        if name in {"output_kind", "skip_clone"}:  # about the way of the answer
            continue
        assert str(getattr(again, name)) == str(getattr(params, name)), name


def test_a_models_own_defaults_do_not_replace_what_was_not_said():
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = completion_fields(SamplingParams())
    again = CompletionRequest(prompt="a", **body).to_sampling_params(16, {"temperature": 0.1, "top_k": 3})
    assert (again.temperature, again.top_k) == (1.0, 0)


def test_what_a_completion_cannot_say_is_refused():
    with pytest.raises(RequestError, match="flat_logprobs"):
        completion_fields(SamplingParams(flat_logprobs=True))


def test_engine_arguments_become_options(nano_path):
    given = AsyncEngineArgs(
        model=str(nano_path), tensor_parallel_size=2, max_model_len=100, block_size=64, enable_chunked_prefill=False,
        hf_overrides={"a": 1},
    )  # fmt: skip
    assert launch_options(changed_fields(given)) == {
        "model": str(nano_path),
        "tensor_parallel_size": 2,
        "max_model_len": 100,
        "extra_args": {"block-size": 64, "no-enable-chunked-prefill": True, "hf-overrides": '{"a":1}'},
    }


def test_options_beside_engine_arguments_are_added_to_them(nano_path, monkeypatch):
    started = []
    monkeypatch.setattr(AsyncVLLM, "_start", lambda options, *_: started.append(options))
    given = AsyncEngineArgs(model=str(nano_path), block_size=64, max_model_len=100)
    AsyncVLLM.launch(given, extra_args={"stream-interval": 4}, max_model_len=200)
    assert started == [
        {
            "model": str(nano_path),
            "max_model_len": 200,
            "extra_args": {"block-size": 64, "stream-interval": 4},
        }
    ]
    with pytest.raises(ConfigError, match="num_replicas"):
        AsyncVLLM.launch(given, engines=2)


def answer(**choice):
    base = {"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "length", "stop_reason": None}
    return {"id": "cmpl-1", "choices": [{**base, **choice}], "usage": {"prompt_tokens_details": {"cached_tokens": 4}}}


def test_ranks_of_the_likeliest_tokens():
    logprobs = {
        "token_logprobs": [-1.0, -5.0],
        "top_logprobs": [
            {"token_id:1": -1.0, "token_id:8": -0.5},
            {"token_id:2": -5.0, "token_id:9": -0.2, "token_id:3": -0.9},
        ],
    }
    out = request_output(answer(logprobs=logprobs), Prompt("a"), SamplingParams(logprobs=2), None, str)
    first, second = out.outputs[0].logprobs
    assert {token: lp.rank for token, lp in first.items()} == {1: 2, 8: 1}
    assert {token: lp.rank for token, lp in second.items()} == {2: None, 9: 1, 3: 2}
    assert [*second] == [2, 9, 3]
    assert first[8].decoded_token == "8"
    assert out.outputs[0].cumulative_logprob == -6.0
    assert out.num_cached_tokens == 4


def test_what_an_answer_lacks_is_said():
    with pytest.raises(EngineError, match="no prompt logprobs"):
        request_output(answer(), Prompt("a"), SamplingParams(prompt_logprobs=1), None, str)
    with pytest.raises(EngineError, match="return_token_ids"):
        request_output(answer(token_ids=None), Prompt("a"), SamplingParams(), None, str)
    with pytest.raises(EngineError, match="2 tokens but 1 logprobs"):
        request_output(answer(logprobs={"token_logprobs": [0.0]}), Prompt("a"), SamplingParams(logprobs=0), None, str)
    with pytest.raises(EngineError, match="3 samples"):
        request_output(answer(), Prompt("a"), SamplingParams(n=3), None, str)
