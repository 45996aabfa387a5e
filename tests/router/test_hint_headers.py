"""What the token client says of a request, and what a real router makes of it."""

from __future__ import annotations

from collections import Counter

import orjson
from router_rig import reply, rig, says

from penstock.engine.client import DataClient
from penstock.engine.openai import OpenAICalls
from penstock.prefix_hash import prefix_hashes
from penstock.types import GenerateBatch

SAMPLE = {"index": 0, "ids": [1], "logprobs": "[[[1,-1.0,1,null]]]", "versions": [[0, 1]], "finish": "length"}
LAST = {"status": 200, "samples": [SAMPLE], "versions": [[[0, 0, 1]]], "answer": {}}
PARAMS = {"max_tokens": 16, "detokenize": False}


one_token = says(reply(orjson.dumps(LAST) + b"\n", headers="Content-Type: application/x-ndjson\r\n"))
events = says(reply(b"data: [DONE]\n\n", headers="Content-Type: text/event-stream\r\nX-Penstock-Progress: stream\r\n"))


async def test_the_token_client_says_all_it_can() -> None:
    prompt = list(range(640))
    async with rig(one_token) as r:
        client = DataClient(r.url)
        batch = GenerateBatch(prompt_token_ids=[prompt, [1, 2], prompt], sampling_params=PARAMS, session_ids=[1, 2, 3])
        await client.generate_batch(batch)
        alone = DataClient(r.url, routed=False)
        await alone.sample(prompt, 1, PARAMS)
        await client.close()
        await alone.close()
        by_session = {seen.header("x-session-id"): seen for seen in r.backends[0].seen}
    assert by_session["1"].header("x-prompt-tokens") == "640"
    assert by_session["1"].header("x-expected-tokens") == "16"
    assert by_session["1"].header("x-prefix-hashes") == prefix_hashes(prompt)
    assert by_session["1"].header("x-group-id") == by_session["3"].header("x-group-id") is not None
    assert by_session["2"].header("x-group-id") is None
    assert by_session["2"].header("x-prefix-hashes") is None
    assert by_session[None].header("x-prefix-hashes") is None


async def test_a_router_spreads_a_group_and_finds_a_beginning() -> None:
    system = list(range(4096))
    async with rig(one_token, one_token, one_token, one_token) as r:
        client = DataClient(r.url)
        await client.generate_batch(GenerateBatch(prompt_token_ids=[[5] * 100] * 16, sampling_params=PARAMS))
        assert set(Counter(len(backend.seen) for backend in r.backends)) == {4}
        await client.sample([*system, 1], 1, PARAMS)
        for i in range(6):
            await client.sample([*system, *[i] * 64], 1, PARAMS)
        await client.close()
        assert sorted(len(backend.seen) - 4 for backend in r.backends) == [0, 0, 0, 7]


async def test_a_streamed_completion_says_as_much_as_one_in_one_piece() -> None:
    prompts = [list(range(640)), [7] * 200]
    async with rig(events) as r:
        client = DataClient(r.url)
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 16, "n": 2}
            assert [chunk async for chunk in OpenAICalls(client).completion_stream(body, session_id="s")] == []
        await client.close()
        by_length = {seen.header("x-prompt-tokens"): seen for seen in r.backends[0].seen}
    assert set(by_length) == {"640", "200"}
    for prompt in prompts:
        seen = by_length[str(len(prompt))]
        assert seen.header("x-expected-tokens") == "32"
        assert seen.header("x-prefix-hashes") == prefix_hashes(prompt)
        assert seen.header("x-session-id") == "s"
