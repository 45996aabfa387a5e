"""What samples have so far, what may be resumed of it, and what is passed on of a stream that begins again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import orjson
import pytest

from penstock.engine.client import DataClient
from penstock.engine.openai import Stream, StreamDeduplicator
from penstock.engine.partial import Partial, Partials, whole_of
from penstock.errors import EngineError, RequestError
from penstock.plugin.resume import check_part, parts_of
from penstock.types import FinishReason, Sample, SamplingParams, VersionSpan
from penstock.wire import COMMENT

PARAMS = SamplingParams()
NEWS = {"ids": [7, 8], "logprobs": "[[[7,-0.5,1,null]],[[8,-1.5,2,null],[9,-0.25,1,null]]]", "versions": [[0, 2]]}
SPANS = [[0, 0, 2], [3, 2, 3]]
LAST = {"ids": [9], "logprobs": "[[[9,-2,1,null]]]", "versions": [[3, 1]], "finish": "length"}


def part_of(*news):
    part = Partial()
    for one in news:
        part.add(one)
    return part


def test_what_was_told_in_pieces_is_one_sample():
    sample = whole_of(part_of(NEWS, LAST), PARAMS, SPANS)
    assert (sample.token_ids, sample.logprobs) == ((7, 8, 9), (-0.5, -1.5, -2.0)), "of the sampled tokens"
    assert (sample.spans, sample.finish_reason) == ((VersionSpan(0, 0, 2), VersionSpan(3, 2, 3)), "length")
    for finish in get_args(FinishReason):
        assert whole_of(part_of(NEWS, {**LAST, "finish": finish}), PARAMS, SPANS).finish_reason == finish
    bare = whole_of(part_of(NEWS, {**LAST, "logprobs": None}), SamplingParams(logprobs=False), SPANS)
    assert bare.logprobs is None
    aborted = part_of({"ids": [], "versions": [], "finish": "abort", "asked": True})
    assert whole_of(aborted, PARAMS, []) == Sample((), "abort", (), ())


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({**LAST, "logprobs": None}, "3 tokens but 2 logprobs"),
        ({**LAST, "logprobs": "{"}, "malformed logprobs of the engine: JSONDecodeError"),
        ({**LAST, "logprobs": "[[]]"}, "malformed logprobs of the engine: IndexError"),
        ({**LAST, "versions": []}, r"versions \[\[0, 2\]\] do not cover the 3 reported tokens"),
        ({**LAST, "versions": [[3, 2]]}, "do not cover the 3 reported tokens"),
        ({**LAST, "finish": "error"}, "unknown finish reason 'error'"),
        ({**LAST, "finish": None}, "reported 3 tokens of it and no end"),
    ],
)
def test_what_does_not_fit_together_is_no_answer(last, message):
    with pytest.raises(EngineError, match=message):
        whole_of(part_of(NEWS, last), PARAMS, SPANS)


TAKEN_UP = {
    "ids": [7, 8],
    "logprobs": ["[[[7,-0.5,1,null]]]", '[[[8,-9999.0,2,"h"],[9,-0.25,1,"i"]]]'],
    "versions": [[-1, 1], [4, 1]],
    "finish": None,
    "stop_reason": None,
}


def checked(part, *, room=8, logprobs=True):
    return check_part(part, room=room, vocab_size=10, logprobs=logprobs)


def test_what_engines_tell_can_be_taken_up():
    assert checked(TAKEN_UP) == [[(7, -0.5, 1, None)], [(8, -9999.0, 2, "h"), (9, -0.25, 1, "i")]]
    assert checked({**TAKEN_UP, "logprobs": []}, logprobs=False) == []
    for finish, reason in zip((*get_args(FinishReason), "stop"), ("hi", None, None, "twice", 8), strict=True):
        assert len(checked({**TAKEN_UP, "finish": finish, "stop_reason": reason}, room=2)) == 2
    partials = Partials()
    partials.add([{**NEWS, "index": 0}, {**LAST, "index": 2}])
    assert [len(checked(part)) for part in parts_of(partials.resume(), 3)] == [2, 0, 1]


def entry(*first):
    return {"logprobs": [orjson.dumps([[first], [[8, -1.0, 1, "h"]]]).decode()]}


MALFORMED = [
    *({"ids": ids} for ids in (None, "78", [7, 10], [7, -1], [7, True], [7, 8.0])),
    *({"finish": finish} for finish in ("error", 7)),
    *({"stop_reason": reason} for reason in ({"a": 1}, 1.5)),
    *(
        {"versions": versions}
        for versions in (None, [], [[0, 2, 3]], [[0, 1]], [[0, 5], [0, -3]], [["x", 2]], [[-2, 2]])
    ),
    *({"logprobs": chunks} for chunks in (None, [], [None], ["[[["], ["[" * 100_000], ["[[],[]]"], ["\ud800"])),
    {"logprobs": TAKEN_UP["logprobs"] * 2},
    *(entry(token, -1.0, 1, "a") for token in ("x", 8, 10)),
    *(entry(7, logprob, 1, "a") for logprob in (None, True)),
    entry(7, -1.0, 1.5, "a"),
    entry(7, -1.0, 1, 5),
    entry(7, -1.0, 1),
    {"logprobs": ["[[[7,-1e999,1,null]],[[8,-1.0,1,null]]]"]},
    {"asked": True},
]


@pytest.mark.parametrize("wrong", MALFORMED, ids=lambda wrong: repr(wrong)[:70])
def test_what_does_not_fit_is_not_taken_up(wrong):
    with pytest.raises(RequestError, match="penstock_resume: ") as error:
        checked({**TAKEN_UP, **wrong})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("part", [None, 5, "x", [], {}, {"ids": []}])
def test_what_is_no_part_is_not_taken_up(part):
    with pytest.raises(RequestError, match="penstock_resume: "):
        checked(part)


@pytest.mark.parametrize("text", [5, None, [], "", "[" * 100_000, "[[[", "{}", "5", "null", "[null,null,null]"])
def test_what_is_no_list_of_the_requests_samples_is_not_read(text):
    with pytest.raises(RequestError, match=r"no JSON|is no list|3 samples where the request asks for 2"):
        parts_of(text, 2)


def test_logprobs_that_nobody_asked_for_are_checked_too():
    with pytest.raises(RequestError, match="not those of token 7"):
        checked({**TAKEN_UP, **entry(9, -1.0, 1, "a")}, logprobs=False)


def test_tokens_need_room():
    with pytest.raises(RequestError, match="2 tokens leave no room"):
        checked(TAKEN_UP, room=2)


def chunk(index=0, *, of="first", finish=None, **choice):
    return {"id": of, "created": len(of), "choices": [{"index": index, **choice, "finish_reason": finish}]}


def new(deduplicator, *chunks):
    return [passed["choices"][0] for passed in map(deduplicator.of, chunks) if passed is not None]


@pytest.mark.parametrize("sizes", [[6], [2, 4], [1] * 6])
def test_behind_a_cut_only_what_is_new_passes_however_it_is_cut(sizes):
    text = "abcdef"
    deduplicator = StreamDeduplicator()
    new(
        deduplicator,
        chunk(text="ab", token_ids=[1, 2], logprobs={"tokens": ["a", "b"]}),
        chunk(text="c", token_ids=[3]),
    )
    deduplicator.begin_again()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chunks = [
        chunk(of="second", text=text[e - s : e], token_ids=list(range(e - s + 1, e + 1)))
        for s, e in zip(sizes, ends, strict=True)
    ]
    passed = new(deduplicator, *chunks, chunk(of="second", text="", finish="stop", token_ids=[]))
    assert "".join(choice["text"] for choice in passed) == "def"
    assert [i for choice in passed for i in choice["token_ids"]] == [4, 5, 6]
    assert passed[-1]["finish_reason"] == "stop"


def test_the_first_ids_stay_and_nothing_comes_twice():
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    deduplicator = StreamDeduplicator()
    new(deduplicator, chunk(delta={"role": "assistant", "content": ""}), chunk(delta={"tool_calls": [call]}))
    deduplicator.begin_again()
    other = {"index": 0, "id": "y", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    third = {"index": 1, "id": "z", "type": "function", "function": {"name": "g", "arguments": ""}}
    chunks = [
        chunk(of="2nd", delta={"role": "assistant", "content": ""}),
        chunk(of="2nd", delta={"tool_calls": [other, third]}),
    ]
    assert deduplicator.of(chunks[0]) is None
    passed = deduplicator.of(chunks[1])
    assert (passed["id"], passed["created"]) == ("first", 5)
    first, second = passed["choices"][0]["delta"]["tool_calls"]
    assert first == {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '": 1}'}}
    assert second == third


def test_usage_comes_once_though_the_stream_broke_off_behind_it():
    usage = {"id": "first", "created": 5, "choices": [], "usage": {"total_tokens": 3}}
    chunks = [chunk(text="a", finish="stop"), usage]
    deduplicator = StreamDeduplicator()
    assert [deduplicator.of(one) for one in chunks] == chunks
    deduplicator.begin_again()
    assert [deduplicator.of(one) for one in chunks] == [None, None]


def report(index=0, **of):
    return {"index": index, "ids": [], "logprobs": None, "versions": [], "finish": None, "stop_reason": None, **of}


def test_what_is_reported_adds_up_to_what_is_resumed():
    partials = Partials()
    assert partials.resume() is None
    assert partials.add([report(1, ids=[4, 5], logprobs="ab", versions=[[0, 1], [1, 1]])]) == 2
    partials.add([report(1, ids=[6], logprobs="c", versions=[[1, 1]]), report(2, finish="abort")])
    assert partials.cut
    zero, one, two = orjson.loads(partials.resume())
    assert zero["ids"] == two["ids"] == []
    assert one == {
        "ids": [4, 5, 6], "logprobs": ["ab", "c"], "versions": [[0, 1], [1, 2]], "finish": None, "stop_reason": None
    }  # fmt: skip
    assert two["finish"] is None, "what a pause aborted goes on"
    partials.add([report(2, ids=[1], finish="abort", asked=True)])
    assert not partials.cut
    assert orjson.loads(partials.resume())[2]["finish"] == "abort"


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"samples": [{"index": 0}]}', b'{"samples": [7]}'])
async def test_a_report_that_is_none_is_named(text):
    async def lines():
        yield COMMENT + text

    request = Stream(DataClient("http://h:1"), "/v1/completions", {}, headers={}, timeout_s=60)
    with pytest.raises(EngineError, match="malformed report of the engine"):
        [event async for event in request.events_of(SimpleNamespace(lines=lines))]
