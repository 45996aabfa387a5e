"""What of a stream that begins anew is passed on; and the parts of which a request is taken up."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from penstock.engine.client import merged
from penstock.engine.partial import Partials, StreamDeduplicator


def chunk(index=0, *, of="first", finish=None, **choice):
    return {"id": of, "created": len(of), "choices": [{"index": index, **choice, "finish_reason": finish}]}


def new(seam, *chunks):
    return [passed["choices"][0] for passed in map(seam.of, chunks) if passed is not None]


def test_an_undisturbed_stream_passes_as_it_is():
    chunks = [
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"content": "a"}, logprobs={"content": [{"logprob": -1.0}]}, token_ids=[7]),
        chunk(delta={"tool_calls": [{"index": 0, "id": "x", "type": "function", "function": {"name": "f"}}]}),
        chunk(delta={"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
        chunk(delta={}, finish="tool_calls", stop_reason=None),
        {"id": "first", "created": 5, "choices": [], "usage": {"total_tokens": 3}},
    ]
    seam = StreamDeduplicator()
    assert [seam.of(one) for one in chunks] == chunks


@pytest.mark.parametrize("sizes", [[6], [2, 4], [1] * 6])
def test_behind_a_seam_only_what_is_new_passes_however_it_is_cut(sizes):
    text = "abcdef"
    seam = StreamDeduplicator()
    new(seam, chunk(text="ab", token_ids=[1, 2], logprobs={"tokens": ["a", "b"]}), chunk(text="c", token_ids=[3]))
    seam.begin_again()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chunks = [
        chunk(of="second", text=text[e - s : e], token_ids=list(range(e - s + 1, e + 1)))
        for s, e in zip(sizes, ends, strict=True)
    ]
    passed = new(seam, *chunks, chunk(of="second", text="", finish="stop", token_ids=[]))
    assert "".join(choice["text"] for choice in passed) == "def"
    assert [i for choice in passed for i in choice["token_ids"]] == [4, 5, 6]
    assert passed[-1]["finish_reason"] == "stop"


def test_the_first_ids_stay_and_nothing_comes_twice():
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    seam = StreamDeduplicator()
    new(seam, chunk(delta={"role": "assistant", "content": ""}), chunk(delta={"tool_calls": [call]}))
    seam.begin_again()
    other = {"index": 0, "id": "y", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    third = {"index": 1, "id": "z", "type": "function", "function": {"name": "g", "arguments": ""}}
    chunks = [
        chunk(of="2nd", delta={"role": "assistant", "content": ""}),
        chunk(of="2nd", delta={"tool_calls": [other, third]}),
    ]
    assert seam.of(chunks[0]) is None
    passed = seam.of(chunks[1])
    assert (passed["id"], passed["created"]) == ("first", 5)
    first, second = passed["choices"][0]["delta"]["tool_calls"]
    assert first == {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": '": 1}'}}
    assert second == third


def test_choices_are_counted_apart_and_an_end_comes_once():
    seam = StreamDeduplicator()
    new(seam, chunk(0, text="a"), chunk(1, text="xy", finish="stop"))
    seam.begin_again()
    passed = new(seam, chunk(1, text="xy", finish="stop"), chunk(0, text="ab", finish="length"))
    assert passed == [{"index": 0, "text": "b", "finish_reason": "length"}]


def test_usage_comes_once_though_the_stream_broke_off_behind_it():
    usage = {"id": "first", "created": 5, "choices": [], "usage": {"total_tokens": 3}}
    chunks = [chunk(text="a", finish="stop"), usage]
    seam = StreamDeduplicator()
    assert [seam.of(one) for one in chunks] == chunks
    seam.begin_again()
    assert [seam.of(one) for one in chunks] == [None, None]


def told(index=0, **of):
    return {"index": index, "ids": [], "logprobs": None, "versions": [], "finish": None, "stop_reason": None, **of}


def test_what_is_told_adds_up_to_what_is_taken_up():
    partials = Partials()
    assert partials.resume() is None
    assert partials.add([told(1, ids=[4, 5], logprobs="ab", versions=[[0, 1], [1, 1]])]) == 2
    partials.add([told(1, ids=[6], logprobs="c", versions=[[1, 1]]), told(2, finish="abort")])
    assert partials.cut
    zero, one, two = orjson.loads(partials.resume())
    assert zero["ids"] == two["ids"] == []
    assert one == {
        "ids": [4, 5, 6], "logprobs": ["ab", "c"], "versions": [[0, 1], [1, 2]], "finish": None, "stop_reason": None
    }  # fmt: skip
    assert two["finish"] is None, "what a pause aborted goes on"
    partials.add([told(2, ids=[1], finish="abort", asked=True)])
    assert not partials.cut
    assert orjson.loads(partials.resume())[2]["finish"] == "abort"


async def stream(*chunks, error=None):
    for one in chunks:
        await asyncio.sleep(0)
        yield one
    if error is not None:
        raise error


async def test_streams_of_several_prompts_are_one():
    usage = {"choices": [], "usage": {"total_tokens": 2, "details": None}}
    streams = [stream(chunk(0, text=str(i)), chunk(1, text=str(i), of=str(i)), usage) for i in range(3)]
    chunks = [one async for one in merged(streams, choices_each=2)]
    assert sorted((c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks[:-1]) == [
        (0, "0"), (1, "0"), (2, "1"), (3, "1"), (4, "2"), (5, "2"),
    ]  # fmt: skip
    assert {c["id"] for c in chunks} == {"first"}
    assert chunks[-1]["usage"]["total_tokens"] == 6


async def test_a_stream_that_fails_ends_the_others():
    ended = asyncio.Event()

    async def endless():
        try:
            while True:
                await asyncio.sleep(0)
                yield chunk(text="x")
        finally:
            ended.set()

    chunks = merged([endless(), stream(error=ValueError("broken"))], choices_each=1)
    with pytest.raises(ValueError, match="broken"):
        async for _ in chunks:
            pass
    assert ended.is_set()
