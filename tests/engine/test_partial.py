"""What samples have so far becomes answers only where its parts fit together."""

from __future__ import annotations

import pytest

from penstock.engine.partial import Partial, whole_of
from penstock.errors import EngineError
from penstock.types import Sample, SamplingParams, VersionSpan

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
    bare = whole_of(part_of(NEWS, {**LAST, "logprobs": None}), SamplingParams(logprobs=False), SPANS)
    assert bare.logprobs is None
    aborted = part_of({"ids": [], "versions": [], "finish": "abort", "asked": True})
    assert whole_of(aborted, PARAMS, []) == Sample((), "abort", (), ())


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({**LAST, "logprobs": None}, "3 tokens but 2 logprobs"),
        ({**LAST, "versions": []}, r"versions \[\[0, 2\]\] do not cover the 3 told tokens"),
        ({**LAST, "versions": [[3, 2]]}, "do not cover the 3 told tokens"),
        ({**LAST, "finish": "error"}, "unknown finish reason 'error'"),
        ({**LAST, "finish": None}, "told 3 tokens of it and no end"),
    ],
)
def test_what_does_not_fit_together_is_no_answer(last, message):
    with pytest.raises(EngineError, match=message):
        whole_of(part_of(NEWS, last), PARAMS, SPANS)


@pytest.mark.parametrize("news", [[LAST], [NEWS, NEWS, LAST], [{"ids": [], "versions": [], "finish": "stop"}]])
def test_a_chunk_that_was_lost_or_came_twice_is_no_answer(news):
    part = part_of(*news)
    with pytest.raises(EngineError, match=f"made 3 tokens of a sample and told {len(part.ids)}"):
        whole_of(part, PARAMS, SPANS)
