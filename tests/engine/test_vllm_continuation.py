"""Requests through pauses and updates on one real vLLM CPU engine: text, tool calls, logprobs and versions.

A request that is cut ("release") is sent again by our client with what it has, as behind a death; a pause cuts none.
`test_continuation.py` has every kind at every moment on the simulated engine, `test_resume.py` every seam in vLLM's
front end, `test_vllm_pausing.py` clients that know nothing of us.
"""

from __future__ import annotations

import asyncio
import json
import os

import openai
import orjson
import pytest
from streams import joined, whole

from nano_models import changed, taught
from own_answers import samples_of
from patience import asked
from penstock.control_types import PauseMode
from penstock.errors import EngineHTTPError
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import GENERATE, PROGRESS_HEADER, generate_body

pytestmark = pytest.mark.vllm

TOKENS = 300
PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]
ON_GPU = "PENSTOCK_TEST_ENGINE" in os.environ


def body(live, **more):
    return {
        "model": str(live.model_path), "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **more
    }  # fmt: skip


def completing(live, **more):
    return body(live, **{"prompt": PROMPT, "logprobs": 1, **more})


def chatting(live, **more):
    return body(live, **{"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **more})


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
KINDS = {
    "generate": lambda live, t: live.engine.generate(
        prompt_token_ids=[PROMPT, [8, 9]], sampling_params=SamplingParams(max_tokens=TOKENS, ignore_eos=True, **t)
    ),
    "completion": lambda live, t: live.engine.completion(completing(live, **t)),
    "completion of several": lambda live, t: live.engine.completion(completing(live, prompt=["12", "3"], **t)),
    "completion stream": lambda live, t: joined(live.engine.completion_stream(completing(live, **USAGE, **t))),
    "chat": lambda live, t: live.engine.chat_completion(chatting(live, **t)),
    "chat stream": lambda live, t: joined(live.engine.chat_completion_stream(chatting(live, **USAGE, **t))),
    "chat with tools": lambda live, t: live.engine.chat_completion(chatting(live, tools=TOOLS, **t)),
    "chat stream with tools": lambda live, t: joined(
        live.engine.chat_completion_stream(chatting(live, tools=TOOLS, **USAGE, **t))
    ),
}
SEEDED = {
    "sample": lambda live: live.engine.sample(PROMPT, 3, SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=2)),
    "completion": lambda live: live.engine.completion(completing(live, n=3, seed=2)),
    "chat": lambda live: live.engine.chat_completion(chatting(live, n=3, seed=2)),
    "chat stream": lambda live: joined(live.engine.chat_completion_stream(chatting(live, n=3, seed=2))),
}


def comparable(answer):
    return whole(answer) if isinstance(answer, dict) and "id" in answer else answer


RELEASE = "release"


async def disturbed(live, ask, mode, samples=1, *, tokens=20, times=2):
    """The answer to a request that was paused (or cut) and resumed when its samples had so many tokens, and again."""
    with live.hold.at(tokens):
        request = asyncio.create_task(ask())
        for _ in range(times):
            await live.hold.reached(samples)
            if mode is PauseMode.WAIT:
                await paused_at_the_end(live)
                break
            await (live.engine.control.verbs.release() if mode == RELEASE else live.engine.pause_generation(mode))
            assert not request.done()
            live.hold.move(2 * tokens)
            await live.engine.resume_generation()
    await live.engine.resume_generation()
    return await request


async def paused_at_the_end(live):
    """A pause that waits: requests in flight end, which they cannot before it has come."""
    pausing = asyncio.create_task(live.engine.pause_generation(PauseMode.WAIT))
    await asked(live.engine.control.is_paused, bool)
    assert not pausing.done()
    live.hold.release()
    await pausing


@pytest.mark.skipif(ON_GPU, reason="on GPUs sums depend on the batch in the last bits")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_changes_nothing_in_a_greedy_answer(live, kind):
    def ask():
        return KINDS[kind](live, {"temperature": 0})

    undisturbed = comparable(await ask())
    continued = live.engine.counters.continued
    samples = 2 if kind in ("generate", "completion of several") else 1
    assert comparable(await disturbed(live, ask, RELEASE, samples)) == undisturbed
    assert live.engine.counters.continued > continued


@pytest.mark.skipif(ON_GPU, reason="on GPUs sums depend on the batch in the last bits")
@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("kind", SEEDED)
async def test_behind_a_pause_an_answer_is_byte_identical(live, kind, mode):
    undisturbed = comparable(await SEEDED[kind](live))
    continued = live.engine.counters.continued
    assert comparable(await disturbed(live, lambda: SEEDED[kind](live), mode, 3)) == undisturbed
    assert live.engine.counters.continued == continued, "nothing is sent again"


async def test_what_is_told_of_tokens_is_vllms_own_answer(live):
    params = SamplingParams(max_tokens=TOKENS, seed=3, ignore_eos=True, n=2, detokenize=False)
    own = await live.engine.control.http.post(GENERATE, generate_body(PROMPT, params), timeout_s=60)
    told = await live.engine.sample(PROMPT, 2, params)
    expected = samples_of(own, params)
    assert [(s.token_ids, s.finish_reason, s.spans) for s in told] == [
        (s.token_ids, s.finish_reason, s.spans) for s in expected
    ]
    assert [s.logprobs for s in told] == [pytest.approx(s.logprobs, abs=1e-5) for s in expected]

    async with live.engine.control.http.stream(
        "POST", GENERATE, orjson.dumps(generate_body(PROMPT, params)), timeout_s=60, headers={PROGRESS_HEADER: "64"}
    ) as reply:
        lines = [orjson.loads(line) async for line in reply.lines()]
    (answer,) = [line["answer"] for line in lines if "answer" in line]
    assert [(c["index"], c["token_ids"], c["logprobs"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (i, [], [], "length") for i in range(2)
    ]
    assert sum(len(one["ids"]) for line in lines for one in line["samples"]) == 2 * TOKENS


def sample_of(choice):
    """A choice of an OpenAI answer, or of a joined stream, as a Sample."""
    if "text" in choice and "ids" in choice:
        ids, logprobs, spans = choice["ids"], choice["logprobs"], choice["versions"]
    else:
        given = choice["logprobs"]
        logprobs = given["token_logprobs"] if "token_logprobs" in given else [e["logprob"] for e in given["content"]]
        ids, spans = choice["token_ids"], choice["weight_versions"]
    spans = tuple(VersionSpan(int(s["version"]), s["start"], s["end"]) for s in spans)
    return Sample(tuple(ids), "length", tuple(logprobs), spans)


@pytest.mark.parametrize("how", [PauseMode.ABORT, RELEASE])
async def test_every_token_has_its_version_on_every_endpoint(live, how):
    """Invariant 1 for n samples, completions and chats, whole and as streams, through two updates and a pause."""
    engine, start = live.engine, live.engine.weight_version
    chat_ids = await engine.data.tokenize(MESSAGES)
    requests = {
        "sample": engine.sample(PROMPT, 3, SamplingParams(max_tokens=TOKENS, ignore_eos=True)),
        "completion": engine.completion(completing(live, n=2)),
        "chat": engine.chat_completion(chatting(live, n=2)),
        "completion stream": joined(engine.completion_stream(completing(live, n=2))),
        "chat stream": joined(engine.chat_completion_stream(chatting(live, n=2))),
    }
    with live.hold.at(40):
        tasks = {name: asyncio.create_task(request) for name, request in requests.items()}
        for seed, way in ((61, how), (62, PauseMode.KEEP)):
            await live.hold.reached(11)
            await (engine.control.verbs.release() if way == RELEASE else engine.pause_generation(way))
            await live.update(changed(live.history.latest, seed))
            live.hold.move(80)
            await engine.resume_generation()
    answers = {name: await task for name, task in tasks.items()}
    samples = [(PROMPT, sample) for sample in answers["sample"]]
    samples += [(PROMPT, sample_of(choice)) for choice in answers["completion"]["choices"]]
    samples += [(chat_ids, sample_of(choice)) for choice in answers["chat"]["choices"]]
    samples += [(PROMPT, sample_of(choice)) for choice in answers["completion stream"].values()]
    samples += [(chat_ids, sample_of(choice)) for choice in answers["chat stream"].values()]
    assert len(samples) == 11
    for prompt, sample in samples:
        assert len(sample.token_ids) == TOKENS
        assert [span.version for span in sample.spans] == [start, start + 1, start + 2]
        assert live.history.worst_difference(prompt, sample) < 1e-4
    unseen = sum(live.history.unseen(prompt, sample) for prompt, sample in samples)
    assert unseen <= 4 * len(samples) / 8, "of four ends each, moved by a token"


async def test_a_tool_call_in_progress_goes_on(live):
    """The engine parses the whole text, however often it was cut: also in the middle of the call's JSON."""
    engine = live.engine
    before = live.history.latest
    arguments = {"a": "0123456789 abcdef"}
    text = "ok " + f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"
    prompt, response = await engine.data.tokenize(MESSAGES), [*await engine.data.tokenize(text), 2]
    await live.update(taught(before, prompt, response))
    asked = chatting(live, tools=TOOLS, temperature=0, ignore_eos=False)
    try:
        undisturbed = whole(await engine.chat_completion(asked))
        (call,) = undisturbed["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments
        for moment in (2, 20, 50):
            with live.hold.at(moment):
                request = asyncio.create_task(engine.chat_completion(asked))
                stream = asyncio.create_task(_collected(engine.chat_completion_stream(asked)))
                await live.hold.reached(2)
                await engine.control.verbs.release()
            await engine.resume_generation()
            choice = (await request)["choices"][0]
            assert choice["message"]["content"] == undisturbed["choices"][0]["message"]["content"]
            assert choice["message"]["tool_calls"][0]["function"] == call["function"]
            assert (choice["finish_reason"], choice["token_ids"]) == ("tool_calls", response)
            content, name, given, finish = await stream
            assert (content.strip(), name, json.loads(given), finish) == ("ok", "add", arguments, "tool_calls")
    finally:
        await live.update(before)


async def _collected(chunks):
    content, names, arguments, finish = "", [], "", None
    async for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                names += [call["function"]["name"]] if call["function"].get("name") else []
                arguments += call["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    assert len(names) == 1
    return content, names[0], arguments, finish


async def test_constrained_output_that_is_cut_is_made_again_and_counted(live):
    """The grammar of vLLM's core begins at its own prompt's end, so such a sample is not taken up in the middle."""
    # vLLM 0.26 answers 500 where a grammar is at its end and the end of text is ignored.
    asked = completing(live, temperature=0, ignore_eos=False, structured_outputs={"regex": "[ab]{150}"})
    undisturbed = whole(await live.engine.completion(asked))
    wasted = live.engine.counters.wasted_tokens
    answer = await disturbed(live, lambda: live.engine.completion(asked), PauseMode.ABORT)
    assert whole(answer) == undisturbed
    assert live.engine.counters.wasted_tokens == wasted, "a pause cuts nothing"
    answer = await disturbed(live, lambda: live.engine.completion(asked), RELEASE)
    assert whole(answer) == undisturbed
    assert live.engine.counters.wasted_tokens > wasted


async def test_beams_have_no_versions_rather_than_wrong_ones(live):
    beams = {"n": 2, "extra_body": {"use_beam_search": True, "ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=f"{live.engine.control.url}/v1", api_key=live.key) as client:
        given = {"model": str(live.model_path), "messages": MESSAGES, "max_tokens": 3, "temperature": 0, **beams}
        answer = await client.chat.completions.with_raw_response.create(**given)
    assert len(answer.parse().choices) == 2
    assert "X-Penstock-Weight-Versions" not in answer.headers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ids": [10_000]}, "outside the vocabulary"),
        # vLLM would decode it behind a token that is part of a character, and its output handler die of it.
        ({"logprobs": ['[[[5, -1.0, 1, "a"]]]']}, "not those of token 4"),
    ],
)
async def test_what_cannot_be_taken_up_here_is_a_400(live, wrong, message):
    part = {"ids": [4], "logprobs": [], "versions": [[0, 1]], "finish": None, "stop_reason": None, **wrong}
    extra = {"vllm_xargs": {"penstock_resume": json.dumps([part])}}
    with pytest.raises(EngineHTTPError, match=message) as error:
        await live.engine.completion(body(live, prompt=PROMPT, **extra))
    assert error.value.status == 400
    assert await live.engine.get_num_unfinished_requests() == 0
    assert (await live.engine.completion(body(live, prompt=PROMPT, max_tokens=2)))["choices"]
