"""A fleet of simulated engine processes and its router: batches, sessions, n-way, the four forms of a completion."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Fleet, GenerateBatch, SamplingParams
from penstock.control_types import UpdateReport
from penstock.engine.openai import add_usage
from penstock.errors import EngineHTTPError, RequestError, UserError
from sim_fleets import CONTEXT, check, in_flight, made, slowed, stepped
from sim_verify import verify


async def test_a_batch_comes_back_in_input_order_from_all_engines(fleet: Fleet) -> None:
    before = await made(fleet)
    prompts = [[1 + i, *range(2, 2 + i % 7)] for i in range(60)]
    # Lengths of answers vary, so that later ones are ready before earlier ones.
    params = SamplingParams(max_tokens=40, n=2, stop_token_ids=tuple(range(100, 140)), detokenize=False)
    out = await fleet.generate(prompt_token_ids=prompts, sampling_params=params)
    check(prompts, out, params)
    assert len({len(ids) for ids in out.response_ids}) > 5
    after = await made(fleet)
    shares = [after[name] - before[name] for name in after]
    assert min(shares) > 0.2 * sum(shares) / len(shares), "no engine stands idle"
    assert sum(shares) == sum(len(ids) for ids in out.response_ids), "no token is made twice or lost"


async def test_chats_and_strings_are_tokenised_by_the_engine(fleet: Fleet) -> None:
    chat = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    out = await fleet.generate(["ab", chat], params)
    single = await fleet.generate(["ab"], params)
    ids = await fleet.data.tokenize("<user>hi<assistant>")
    as_ids = await fleet.generate(prompt_token_ids=[ids], sampling_params=params)
    assert out.response_ids == [single.response_ids[0], as_ids.response_ids[0]]
    assert out.responses[1] == as_ids.responses[0] != ""


async def test_a_mapping_is_the_batch_and_not_a_prompt_for_each_key(fleet: Fleet) -> None:
    """The call of the systems that Penstock stands in for."""
    params = {"max_tokens": 6, "temperature": 0.0}
    ids = [[1, 2, 3], [4, 5]]
    batch = {"prompts": None, "prompt_token_ids": ids, "sampling_params": params, "session_ids": ["a", 1]}
    out = await fleet.generate(batch)
    assert out.response_ids == (await fleet.generate(prompt_token_ids=ids, sampling_params=params)).response_ids
    out = await fleet.generate({"prompts": ["ab"], "sampling_params": params})
    assert out.response_ids == (await fleet.generate(["ab"], params)).response_ids
    with pytest.raises(RequestError, match=r"unknown key of a batch 'prompt_tokens'; did you mean 'prompt_token_ids'"):
        await fleet.generate({"prompt_tokens": ids})
    with pytest.raises(RequestError, match=r"a whole batch was given, and sampling_params, session_ids beside it"):
        await fleet.generate(batch, params, session_ids=["a", "b"])


WRONG = {
    "prompts": (lambda f: f.generate(5), "prompts is of type int"),
    "session_ids": (lambda f: f.generate(["a"], session_ids=5), "session_ids is of type int"),
    "bytes of ids": (lambda f: f.sample(b"12", 1), "prompt_token_ids must be a list of token ids, got b'12'"),
    "num_samples": (lambda f: f.sample([1], [1]), "num_samples is \\[1\\]|parameter n must be"),
    "completion": (lambda f: f.completion(None), "a request's body is a mapping, got NoneType"),
    "chat_completion": (lambda f: f.chat_completion("x"), "a request's body is a mapping, got str"),
    "completion_stream": (lambda f: anext(f.completion_stream(5)), "a request's body is a mapping, got int"),
    "chat_completion_stream": (lambda f: anext(f.chat_completion_stream(5)), "a request's body is a mapping, got int"),
    "policy": (lambda f: f.set_policy(None), "malformed policy"),
    "policies": (lambda f: f.set_policy([5]), "malformed policy"),
    "init_info": (lambda f: f.init_weight_update_communicator(None), "malformed init_info"),
    "rank_offset": (lambda f: f.init_weight_update_communicator({"rank_offset": "x"}), "malformed init_info"),
    "tags": (lambda f: f.wake_up(5), "malformed memory tags"),
    "mixed tags": (lambda f: f.wake_up([None, "x"]), "malformed memory tags"),
    "adapter's name": (lambda f: f.load_adapter(5, "/x", timeout_s=1), "an adapter's name is 1 to"),
    "surrogate": (lambda f: f.load_adapter("\ud800", "/x", timeout_s=1), "an adapter's name is 1 to"),
    "path": (lambda f: f.load_adapter("a", None, timeout_s=1), "malformed path of an adapter"),
    "path with NUL": (lambda f: f.load_adapter("a", "\0", timeout_s=1), "malformed path of an adapter"),
    "path with surrogate": (lambda f: f.load_adapter("a", "\ud800", timeout_s=1), "malformed path of an adapter"),
    "pinned": (lambda f: f.pin_adapter(["a"]), "there is no adapter"),
    "rpc's deadline": (lambda f: f.collective_rpc("x", None), "timeout_s is None, and this call needs a deadline"),
    "no report": (lambda f: f.recovered({"version": 1}), "recovered takes the report of an update, got {'version': 1}"),
    "its deadline": (lambda f: f.recovered(UpdateReport(1, 1, {}, ()), timeout_s="x"), "timeout_s is a number of"),
    "NaN": (lambda f: f.collective_rpc("x", args=(math.nan,)), "malformed arguments of collective_rpc: ValueError"),
    "infinity": (lambda f: f.collective_rpc("x", kwargs={"a": math.inf}), "malformed arguments of collective_rpc"),
    "weights": (lambda f: f.update_weights({"w": torch.ones(1)}), "takes pairs of a name and a tensor, not a dict"),
    "no weights": (lambda f: f.update_weights(None), "takes pairs of a name and a tensor, not a NoneType"),
    "pause mode": (lambda f: f.pause_generation("foo"), "unknown pause mode 'foo'; known: keep, wait, abort"),
    "text as list": (lambda f: f.collective_rpc("x", args="ab"), "args is the text 'ab'; give a list"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "says"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_argument_is_an_error_of_penstock(fleet: Fleet, call: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        await call(fleet)


@pytest.mark.parametrize("session", [17, "conversation-a"])
async def test_a_session_stays_on_one_engine(fleet: Fleet, session) -> None:
    before = await made(fleet)
    for _ in range(3):
        batch = GenerateBatch(
            prompt_token_ids=[[1, 2]] * 6, sampling_params={"max_tokens": 5}, session_ids=[session] * 6
        )
        await fleet.generate(batch)
        await fleet.sample([1, 2], 2, {"max_tokens": 5}, session_id=str(session))  # a number is its text
    after = await made(fleet)
    grew = {name: after[name] - before[name] for name in after}
    assert sorted(grew.values()) == [0, 0, 3 * (6 + 2) * 5]


async def test_sample_is_one_n_way_request(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=12, seed=5)
    samples = await fleet.sample([4, 5, 6], 4, params)
    assert len({sample.token_ids for sample in samples}) == 4
    for i, sample in enumerate(samples):
        assert verify([4, 5, 6], sample, params=params, seeds=[5 + i], context=CONTEXT) == []


FORMS = {
    "string": "abc",
    "strings": ["abc", "d", "ef"],
    "ids": [5, 6, 7],
    "lists of ids": [[5, 6, 7], [8], [9, 10], [11]],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 3])
async def test_completion_takes_four_forms(fleet: Fleet, form: str, n: int) -> None:
    prompt = FORMS[form]
    body = {"model": "sim-model", "max_tokens": 5, "n": n, "seed": 11}
    answer = await fleet.completion({**body, "prompt": prompt})
    alone = prompt if form in ("strings", "lists of ids") else [prompt]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(alone) * n))
    expected = [await fleet.completion({**body, "prompt": one}) for one in alone]
    texts = [choice["text"] for one in expected for choice in one["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert len(set(texts)) == len(texts)
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][key] == sum(one["usage"][key] for one in expected)
    assert answer["usage"]["completion_tokens"] == len(alone) * n * 5


def test_details_of_usage_are_summed_too() -> None:
    usage = {"total_tokens": 5, "prompt_tokens_details": None}
    more = {"total_tokens": 20, "prompt_tokens_details": {"cached_tokens": 4}}
    assert add_usage([usage, more, more]) == {"total_tokens": 45, "prompt_tokens_details": {"cached_tokens": 8}}


async def test_a_failing_part_fails_the_whole_and_cancels_the_rest(fleet: Fleet) -> None:
    long, slow = list(range(1, CONTEXT + 50)), [[i] for i in range(1, 20)]
    before = await made(fleet)
    async with slowed(fleet):
        with pytest.raises(EngineHTTPError) as caught:
            await fleet.completion({"model": "sim-model", "prompt": [*slow, long], "max_tokens": 400})
        assert (caught.value.status, caught.value.error_type) == (400, "BadRequestError")
        assert str(CONTEXT) in str(caught.value), "the engine's own message says which limit"
        await in_flight(fleet, lambda requests: requests == 0)
    after = await made(fleet)
    assert sum(after.values()) - sum(before.values()) < 0.5 * 400 * len(slow), "the others were not made to the end"


async def test_figures_sizes_and_worker_calls(fleet: Fleet) -> None:
    assert (fleet.tp_size, fleet.pp_size, fleet.dp_size) == (1, 1, 3)
    async with slowed(fleet):
        batch = asyncio.create_task(
            fleet.generate(prompt_token_ids=[[1]] * 30, sampling_params={"max_tokens": 300, "detokenize": False})
        )
        await in_flight(fleet, lambda requests: requests == 30)
        await stepped(fleet, 10)  # so that none of the engines has all of its requests in its queue
        each = [await fleet.get_num_unfinished_requests(i) for i in range(3)]
        usages = [await fleet.get_cache_usage(i) for i in range(3)]
        assert sum(each) == 30
        assert all(usage > 0 for usage in usages)
        assert await fleet.get_cache_usage() == pytest.approx(sum(usages) / 3, rel=0.5)
        assert (
            await fleet.collective_rpc("work", 5.0, (1, "a"), {"k": 2})
            == [{"method": "work", "args": [1, "a"], "kwargs": {"k": 2}}] * 3
        )
        await fleet.abort_generation()
    assert set((await batch).stop_reasons) == {"abort"}
    with pytest.raises(UserError, match="there is no engine 3; the fleet has e0, e1, e2"):
        await fleet.get_cache_usage(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt_token_ids": []}, "empty batch"),
        ({"prompt_token_ids": [[1], []]}, r"prompt_token_ids\[1\] is empty"),
        ({"prompt_token_ids": [[1], [5, 1024]]}, r"token_ids\[1\]\[1\] is 1024, outside the vocabulary \[0, 1024\)"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"n": 0}}, "n must be at least 1, got 0"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "session_ids has 2 entries for 1 prompts"),
        ({"prompt_token_ids": [["a"]]}, r"prompt_token_ids\[0\] must be a list of token ids, got \['a'\]"),
        ({"prompts": ["a", ""]}, r"prompts\[1\] has no token; give at least one"),
        ({"prompts": ["a"], "sampling_params": {"max_tokens": "5"}}, "max_tokens must be a whole number, got '5'"),
        ({"prompts": ["a"], "sampling_params": {"logprobs": 5}}, "true or false, or vLLM's 0 or 1, got 5"),
        ({"prompts": ["a"], "sampling_params": {"seed": 2**70}}, "seed must be a number of 64 bits"),
        ({"prompts": ["a"], "sampling_params": {"temperature": float("nan")}}, "temperature must be a finite number"),
        ({"prompts": ["a"], "sampling_params": {"stop": [""]}}, "stop must be a string or a list of them, none empty"),
        ({"prompts": ["a"], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be a list of token"),
    ],
)
async def test_malformed_requests_are_refused_before_anything_is_sent(fleet: Fleet, call, message: str) -> None:
    before = await made(fleet)
    with pytest.raises(RequestError, match=message):
        await fleet.generate(**call)
    assert await made(fleet) == before


async def test_numbers_of_numpy_and_torch_are_numbers(fleet: Fleet) -> None:
    params = SamplingParams(max_tokens=5, seed=3, temperature=0.5)
    wanted = await fleet.generate(prompt_token_ids=[[1, 2]], sampling_params=params)
    theirs = {"max_tokens": np.int64(5), "seed": np.int32(3), "temperature": np.float32(0.5)}
    for ids in (np.array([[1, 2]]), torch.tensor([[1, 2]]), [torch.tensor([1, 2])], [(1, 2)]):
        assert await fleet.generate(prompt_token_ids=ids, sampling_params=theirs) == wanted
    texts = await fleet.generate(["a", "b"], sampling_params=params)
    assert await fleet.generate(np.array(["a", "b"]), sampling_params=params, session_ids=np.array(["s", "t"])) == texts
    without = await fleet.generate(["a"], sampling_params={"max_tokens": 5, "logprobs": None})  # vLLM's default
    assert without.response_logprobs is None
    counted = await fleet.generate(["a"], sampling_params={"max_tokens": 5, "logprobs": 0})  # the sampled token's
    assert counted.response_logprobs is not None
    assert len(counted.response_logprobs[0]) == 5
    (sample,) = await fleet.sample(np.array([1, 2]), 1, theirs)
    assert sample.token_ids == wanted.response_ids[0]
    with pytest.raises(RequestError, match=r"n must be a whole number, got 1\.5"):
        await fleet.sample([1, 2], 1.5)
    with pytest.raises(RequestError, match="num_samples is 1, and sampling parameter n is 2; leave n out"):
        await fleet.sample([1, 2], 1, {"n": 2})
    with pytest.raises(RequestError, match="prompt_token_ids must be a list of token ids, got abc"):
        await fleet.sample("abc", 1)


async def test_requests_that_only_the_engine_can_judge_carry_its_message(fleet: Fleet) -> None:
    long = list(range(1, CONTEXT + 2))
    with pytest.raises(EngineHTTPError, match=str(CONTEXT)) as caught:
        await fleet.generate(prompt_token_ids=[[1], long])
    assert caught.value.status == 400
    with pytest.raises(EngineHTTPError) as caught:
        await fleet.completion({"model": "sim-model", "prompt": "a", "n": 0})
    assert caught.value.status == 400
    with pytest.raises(EngineHTTPError) as caught:
        await fleet.completion({"model": "sim-model", "prompt": "a", "max_tokens": -1})
    assert caught.value.status == 400
    for prompt, message in (
        ([], "prompt is an empty list"),
        ({"a": 1}, "got dict"),
        (["a", [1]], "mixes strings and token ids"),
        ([[1], []], r"prompt\[1\] is \[\]"),
        ([True, False], r"prompt\[0\] is True"),
        ([[1], [2.5]], r"prompt\[1\] is \[2.5\]"),
    ):
        with pytest.raises(RequestError, match=message):
            await fleet.completion({"model": "sim-model", "prompt": prompt})
    with pytest.raises(RequestError, match="n must be at least 1, got 0"):
        await fleet.sample([1], 0)
