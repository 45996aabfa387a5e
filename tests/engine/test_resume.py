"""A sample that is resumed: the answer is that of an undisturbed one, wherever it was cut.

VLLM's own front end does the work; the seam lies once behind every token, also inside of characters of several bytes,
of stop strings and before `min_tokens`.
"""

from __future__ import annotations

from functools import cache

import orjson
import pytest

from penstock.engine.partial import Partials
from penstock.wire import RESUME_ARG

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7]


@cache
def tokenizer():
    from vllm_frontend import byte_tokenizer

    return byte_tokenizer()


def ids(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def params(*, stream: bool, **given):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**{"max_tokens": 30, "logprobs": 1, "output_kind": kind, "temperature": 1.0, **given})


async def run(script, cuts, given, *, stream, labels=True, how="abort", light=False):
    """The request over as many engines as there are cuts, and one: choices, spans, and tokens told by the last."""
    from vllm_frontend import FrontEnd, Reader

    from penstock.plugin.progress import RequestProgress

    partials = Partials()
    version = 0
    for cut in [*cuts, None]:
        front = FrontEnd(tokenizer(), script, PROMPT, labels=labels)
        front.in_flight = RequestProgress(streamed=light)
        reader = Reader(given.get("n", 1))
        asked = params(stream=stream, **given)
        if (resume := partials.resume()) is not None:
            asked.extra_args = {RESUME_ARG: resume, "other": 1}
        queue = await front.submit(asked)
        for request in front.running.values():
            assert (request.sampling_params.extra_args or {}).keys() <= {"other"}, "the core has no use for it"
        steps = 0
        while steps != cut:
            # A version ends after every fourth token, so that spans and seams cut each other anywhere.
            front.version = version // 4
            reader.read(queue, deltas=stream)
            if not front.step():
                break
            version, steps = version + 1, steps + 1
        else:
            if how == "abort":
                front.abort()
        reader.read(queue, deltas=stream)
        partials.add(front.in_flight.take_updates())
        for partial in partials:
            if partial.cut:
                partial.finish = None
    assert not front.processor.request_states, "an ended sample is still known to vLLM"
    assert not front.processor.parent_requests
    return reader.choices, front.in_flight.spans(), partials


def everything(partials):
    """What was told, however it was cut in chunks."""
    return [
        {**p.as_json(), "logprobs": [position for chunk in p.logprobs for position in orjson.loads(chunk)]}
        for p in partials
    ]


TEXT = "aé€😀b漢字stop c😀"
CASES = {
    "multi-byte": ([ids(TEXT)], {"max_tokens": len(ids(TEXT))}),
    "stop string": ([ids(TEXT)], {"stop": ["stop"]}),
    "stop string of several bytes": ([ids(TEXT)], {"stop": ["字st", "zz"]}),
    "stop string kept": ([ids(TEXT)], {"stop": ["字st"], "include_stop_str_in_output": True}),
    "end of sequence": ([[*ids("abc😀"), 256]], {}),
    "end of sequence shown": ([[*ids("ab"), 256]], {"skip_special_tokens": False}),
    "min_tokens": ([[*ids("stop😀stop"), 256]], {"stop": ["stop"], "min_tokens": 6}),
    "no text": ([ids("abcdef")], {"max_tokens": 6, "detokenize": False}),
    "three samples": ([ids("a😀bc"), [*ids("é"), 256], ids("xystopz")], {"n": 3, "max_tokens": 7, "stop": ["stop"]}),
    "three with a seed": ([ids("a😀bc"), [256], ids("xy漢z")], {"n": 3, "max_tokens": 6, "seed": 4}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["abort", "death"])
async def test_wherever_it_is_cut_the_answer_is_that_of_an_undisturbed_one(case, stream, how):
    script, given = CASES[case]
    whole, spans, told = await run(script, [], given, stream=stream)
    assert all(choice["finish"] in ("stop", "length") for choice in whole)
    longest = max(len(choice["ids"]) for choice in whole)
    for first in range(longest + 1):
        for second in (None, 1):
            cuts = [first] if second is None else [first, second]
            again, its_spans, its_told = await run(script, cuts, given, stream=stream, how=how)
            assert again == whole, f"cut after {cuts}"
            assert its_spans == spans, f"cut after {cuts}"
            assert everything(its_told) == everything(told), f"cut after {cuts}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["abort", "death"])
@pytest.mark.parametrize("kind", [{}, {"logprobs": -1}, {"flat_logprobs": True}], ids=["plain", "all", "flat"])
async def test_an_answer_without_its_tokens_leaves_what_is_told_as_it_was(case, how, kind):
    script, given = CASES[case]
    whole, spans, told = await run(script, [], {**given, **kind}, stream=False)
    for cuts in ([], [1], [3, 1]):
        answer, its_spans, its_told = await run(script, cuts, {**given, **kind}, stream=False, how=how, light=True)
        assert answer == [{**choice, "ids": [], "logprobs": []} for choice in whole]
        assert (its_spans, everything(its_told)) == (spans, everything(told))


async def test_text_is_that_of_all_tokens_together():
    choices, _, _ = await run([ids(TEXT)], [2, 2], {"max_tokens": len(ids(TEXT))}, stream=True)
    assert choices[0]["text"] == TEXT == tokenizer().decode(choices[0]["ids"])


@pytest.mark.parametrize("labels", [True, False], ids=["labelled", "as 0.26"])
async def test_versions_are_exact_across_a_seam(labels):
    given = {"max_tokens": 11, "detokenize": False}
    for cuts in ([], *([first] for first in range(12))) if labels else ([],):  # without labels a seam has none to seed
        whole, spans, _ = await run([list(range(11))], cuts, given, stream=False, labels=labels)
        assert spans == [[[0, 0, 4], [1, 4, 8], [2, 8, 11]]]
        if labels and whole[0]["versions"] is not None:  # not vLLM 0.26
            native = [[int(v.version.replace("default", "0")), v.start, v.end] for v in whole[0]["versions"]]
            assert native == spans[0]


async def test_what_the_core_gets_is_prompt_and_partial_and_what_is_left_of_the_limits():
    from vllm_frontend import FrontEnd

    logprobs = ['[[[1, -1.0, 1, "a"]], [[2, -1.0, 1, "b"]]]', '[[[3, -1.0, 1, "c"]]]']
    part = {"ids": [1, 2, 3], "logprobs": logprobs, "versions": [[0, 3]], "finish": None, "stop_reason": None}
    front = FrontEnd(tokenizer(), [list(range(30))], PROMPT, labels=True)
    asked = params(stream=False, max_tokens=10, min_tokens=5, n=2)
    asked.extra_args = {RESUME_ARG: orjson.dumps([part])}
    await front.submit(asked)
    taken_up, new = front.running.values()
    assert (taken_up.prompt_token_ids, new.prompt_token_ids) == ([*PROMPT, 1, 2, 3], PROMPT)
    assert (taken_up.sampling_params.max_tokens, new.sampling_params.max_tokens) == (7, 10)
    assert (taken_up.sampling_params.min_tokens, new.sampling_params.min_tokens) == (2, 5)


@pytest.mark.parametrize(
    ("given", "whole_only"),
    [({}, False), ({"structured_outputs": True}, True), ({"prompt_logprobs": 1}, True)],
)
async def test_what_cannot_be_taken_up_in_the_middle_says_so(given, whole_only):
    from vllm.sampling_params import StructuredOutputsParams
    from vllm_frontend import FrontEnd

    if "structured_outputs" in given:
        given = {"structured_outputs": StructuredOutputsParams(regex="a+")}
    front = FrontEnd(tokenizer(), [list(range(30))], PROMPT, labels=True)
    await front.submit(params(stream=False, **given))
    front.step()
    (news,) = front.in_flight.take_updates()
    assert news["whole_only"] is whole_only


LOGPROBS = ["[[[1, -1.0, 1, null]], [[2, -1.0, 1, null]], [[3, -1.0, 1, null]]]"]
PART = {"ids": [1, 2, 3], "logprobs": LOGPROBS, "versions": [[0, 3]], "finish": None, "stop_reason": None}
NONE = {"ids": [], "logprobs": [], "versions": [], "finish": None, "stop_reason": None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{**PART, "ids": [1, 257, 3]}], "outside the vocabulary"),
        ([{**PART, "logprobs": []}], "3 tokens but 0 logprobs"),
        ([{**PART, "ids": [1] * 10, "versions": [[0, 10]]}], "leave no room"),
        ([NONE, {**NONE, "finish": 7}], "'repetition', got 7"),
        ([NONE] * 3, "3 samples where"),
    ],
)
async def test_what_would_end_the_core_is_refused_and_leaves_nothing_behind(parts, message):
    from vllm.exceptions import VLLMValidationError
    from vllm_frontend import FrontEnd

    front = FrontEnd(tokenizer(), [list(range(30))], PROMPT, labels=True)
    asked = params(stream=False, max_tokens=10, n=min(len(parts), 2))
    asked.extra_args = {RESUME_ARG: orjson.dumps(parts)}
    with pytest.raises(VLLMValidationError, match=message):
        await front.submit(asked)
    assert not front.running
    assert not front.processor.request_states
