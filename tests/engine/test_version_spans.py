"""Counting tokens by weight version, as vLLM 0.26 needs it; the classes of vLLM that it touches are played here.

On real vLLM 0.26 `tests/engine/test_vllm_engine.py` holds it, run on a GPU machine (CONTRIBUTING.md).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import orjson
import pytest

from penstock.engine.vllm_plugin.version_spans import VersionSpans
from penstock.engine.wire import FINAL_ONLY, SPANS_HEADER, generate_body, samples_of
from penstock.errors import EngineError
from penstock.types import SamplingParams, VersionSpan


class Processor:
    """What AsyncLLM's output processor is to the plugin."""

    def __init__(self):
        self.request_states = {}
        self.processed = []

    def process_outputs(self, outputs, *args):
        self.processed += outputs
        return args


def engine_of(processor):
    return SimpleNamespace(
        output_processor=processor, engine_core=SimpleNamespace(outputs_queue=asyncio.Queue())
    )  # no update_weight_version: vLLM 0.26


async def serve(spans, engine, during, path=b"generate-tokens"):
    """One HTTP request through the plugin; `during(step, register)` plays the engine."""
    sent = []

    async def app(scope, _receive, send):
        name = dict(scope["headers"])[b"x-request-id"].decode()

        def register(index, prompt=None):
            external = f"{path.decode()}-{name}" + ("" if prompt is None else f"-{prompt}")
            key = f"{index}_{external}"
            state = SimpleNamespace(parent_req=SimpleNamespace(external_req_id=external), request_index=index)
            engine.output_processor.request_states[key] = state
            return key

        def step(**tokens):
            outputs = [SimpleNamespace(request_id=k, new_token_ids=[0] * n) for k, n in tokens.items()]
            return engine.output_processor.process_outputs(outputs, "more")

        during(step, register)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"json")]})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/inference/v1/generate",
        "headers": [(b"x-request-id", b"the client's own")],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=engine)),
    }
    await spans.pass_on(app, scope, None, send)
    headers = {key.decode().lower(): value for key, value in sent[0]["headers"]}
    given = headers.get(SPANS_HEADER.lower())
    return None if given is None else orjson.loads(given)


async def test_tokens_are_counted_under_the_version_in_force():
    spans, processor = VersionSpans(), Processor()

    def during(step, register):
        first, second = register(0), register(1)
        assert step(**{first: 3, second: 1}) == ("more",), "the wrapped method's own answer"
        spans.set_version(4)
        step(**{second: 2})
        spans.set_version(5)
        step(**{second: 1, "somebody else's": 9})

    given = await serve(spans, engine_of(processor), during)
    assert given == [[[0, 0, 3]], [[0, 0, 1], [4, 1, 3], [5, 3, 4]]]
    assert len(processor.processed) == 5


async def test_prompts_stay_in_order_and_a_sample_without_tokens_has_no_span():
    spans = VersionSpans()

    def during(step, register):
        keys = {(p, i): register(i, prompt=p) for p in range(12) for i in range(2)}
        for (prompt, index), key in keys.items():
            if (prompt, index) != (3, 0):
                step(**{key: 1 + prompt})

    given = await serve(spans, engine_of(Processor()), during, path=b"cmpl")
    assert [s[0][2] if s else 0 for s in given] == [0 if (p, i) == (3, 0) else 1 + p for p in range(12) for i in (0, 1)]


async def test_after_a_pause_everything_made_before_it_is_counted():
    spans, processor = VersionSpans(), Processor()
    engine = engine_of(processor)
    queue = engine.engine_core.outputs_queue

    async def handler():  # as AsyncLLM's output handler: it yields to the loop between portions of one batch
        while True:
            for outputs in await queue.get():
                processor.process_outputs(outputs)
                await asyncio.sleep(0)

    task = asyncio.create_task(handler())
    processor.request_states = {str(i): None for i in range(300)}
    queue.put_nowait([["a"], ["b"], ["c"]])
    queue.put_nowait([["d"]])
    spans.install(engine)
    processor.process_outputs = processor.processed.extend
    await spans.settle(engine)
    assert processor.processed == ["a", "b", "c", "d"]
    task.cancel()


async def test_a_vllm_that_labels_tokens_itself_is_left_alone():
    processor = Processor()
    engine = engine_of(processor)
    engine.update_weight_version = None
    before = processor.process_outputs
    spans = VersionSpans()
    spans.install(engine)
    assert processor.process_outputs == before


def answer(*choices):
    return {"choices": [{"index": i, "token_ids": ids, "finish_reason": "stop"} for i, ids in enumerate(choices)]}


PARAMS = SamplingParams(n=2, logprobs=False)


def test_the_header_becomes_spans():
    headers = {SPANS_HEADER: "[[[0,0,2],[1,2,3]]]"}
    first, second = samples_of(answer([7, 8, 9], []), headers, PARAMS)
    assert first.spans == (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3))
    assert second.spans == ()


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "does not say which weights"),
        ({SPANS_HEADER: "[[[0,0,2]],[[0,0,1]]]"}, "do not cover its 3 tokens"),
        ({SPANS_HEADER: "[[[0,0,2],[1,1,3]],[[0,0,1]]]"}, "do not cover its 3 tokens"),
    ],
)
def test_tokens_without_exact_versions_are_refused(headers, message):
    with pytest.raises(EngineError, match=message):
        samples_of(answer([7, 8, 9], [1]), headers, PARAMS)


def test_missing_samples_are_refused():
    """As vLLM 0.26 answered before `output_kind` was sent."""
    with pytest.raises(EngineError, match=r"asked for 3 samples, got those with index \[0, 1\]"):
        samples_of(answer([1], [2]), {}, SamplingParams(n=3))


def test_a_request_asks_for_one_answer_at_the_end():
    """What vLLM 0.26 needs to return every sample of an n-way request."""
    assert generate_body([1, 2], PARAMS)["sampling_params"]["output_kind"] == FINAL_ONLY == 2
