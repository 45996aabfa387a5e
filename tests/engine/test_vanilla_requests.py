"""What becomes of the answers of vLLM without our plugin, as it gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from canned import answer, canned
from patience import WAIT_S
from penstock.engine.client import DataClient
from penstock.engine.vanilla import VanillaReplies
from penstock.errors import EngineError
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import UNKNOWN_VERSION

PARAMS = SamplingParams(n=2, max_tokens=5, seed=7, min_tokens=4, logprobs=False, detokenize=False)
ONE, TWO = ([{"version": "3", "start": 0, "end": end}] for end in (1, 2))
LABELS = [{"version": "2", "start": 0, "end": 1}, {"version": "step-100", "start": 1, "end": 3}]


def choice(index: int, *ids: int, finish: str = "stop", **more: Any) -> dict[str, Any]:
    return {"index": index, "token_ids": list(ids), "finish_reason": finish, "logprobs": None, **more}


async def asked(
    *answers: list[dict[str, Any]],
    of: list[dict[str, Any]] | None = None,
    params: SamplingParams = PARAMS,
) -> list[Sample]:
    """The samples that a client makes of these answers, the bodies that it sent for them in `of`."""
    async with canned(*(answer({"choices": choices}) for choices in answers)) as server:
        data = DataClient(server.url, request_timeout_s=WAIT_S)
        data.unreported = VanillaReplies(tuple)
        try:
            return await data.sample([1], params.n, params)
        finally:
            await data.close()
            if of is not None:
                of += map(orjson.loads, server.bodies)


async def test_its_versions_are_those_that_it_says() -> None:
    first, second = await asked([choice(1, 9, weight_versions=ONE), choice(0, 5, 6, 7, weight_versions=LABELS)])
    assert first.spans == (VersionSpan(2, 0, 1), VersionSpan(UNKNOWN_VERSION, 1, 3)), "a label that is no version"
    assert second.spans == (VersionSpan(3, 0, 1),)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([choice(0, 5), choice(1, 6)], "does not say which weights made its tokens"),
        ([choice(0, 5, weight_versions=LABELS), choice(1)], "do not cover the 1 reported tokens"),
        ([choice(0)], "reported 0 tokens of it and no end"),
        ([choice(0), choice(1, finish="bored")], "unknown finish reason 'bored'"),
    ],
)
async def test_what_does_not_fit_together_is_no_answer(choices: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await asked(choices)


@pytest.mark.parametrize("ids", [({"token_id": 5}, {"token_id": 6}), ({}, {})])
async def test_logprobs_are_those_of_the_tokens_also_where_entries_have_no_id(ids: tuple[dict[str, int], ...]) -> None:
    entries = [{"token": "a", "logprob": -0.5} | ids[0], {"token": "b", "logprob": -1.5} | ids[1]]
    made = choice(0, 5, 6, logprobs={"content": entries}, weight_versions=TWO)
    other = choice(1, 9, logprobs={"content": entries[:1]}, weight_versions=ONE)
    first, _ = await asked([made, other], params=replace(PARAMS, logprobs=True))
    assert first.token_ids == (5, 6)
    assert first.logprobs == (-0.5, -1.5)


async def test_fewer_logprobs_than_tokens_are_no_answer() -> None:
    short = choice(0, 5, 6, logprobs={"content": [{"token": "a", "logprob": -0.5}]}, weight_versions=TWO)
    with pytest.raises(EngineError, match="logprob"):
        await asked([short, choice(1, 9, weight_versions=ONE)], params=replace(PARAMS, logprobs=True))


async def test_what_a_pause_has_cut_is_asked_for_with_its_tokens_and_joined() -> None:
    one = [{"version": "1", "start": 0, "end": 2}]
    cut = [choice(0, 5, 6, weight_versions=one), choice(1, 8, 9, finish="abort", weight_versions=one)]
    again = [choice(0, 10, finish="abort", weight_versions=[{"version": "2", "start": 0, "end": 1}])]
    rest = [choice(0, 11, 12, finish="length", weight_versions=[{"version": "2", "start": 0, "end": 2}])]
    bodies: list[dict[str, Any]] = []
    first, second = await asked(cut, again, rest, of=bodies)
    assert (first.token_ids, first.finish_reason) == ((5, 6), "stop")
    assert (second.token_ids, second.finish_reason) == ((8, 9, 10, 11, 12), "length")
    assert second.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 5))
    assert [body["token_ids"] for body in bodies] == [[1], [1, 8, 9], [1, 8, 9, 10]]
    wanted = [(params["n"], params["max_tokens"], params["min_tokens"], params["seed"]) for params in
              (body["sampling_params"] for body in bodies)]  # fmt: skip
    assert wanted == [(2, 5, 4, 7), (1, 3, 2, 8), (1, 2, 1, 8)]


async def test_one_that_was_cut_before_it_could_say_that_this_was_the_end() -> None:
    one = [{"version": "1", "start": 0, "end": 5}]
    full = [choice(i, 1, 2, 3, 4, 5, finish="abort", weight_versions=one) for i in range(2)]
    assert [sample.finish_reason for sample in await asked(full)] == ["length"] * 2
