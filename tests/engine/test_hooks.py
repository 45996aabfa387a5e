"""What requests have made, as vLLM 0.26 needs it counted and as it is reported; vLLM's classes are faked here.

`test_resume.py` has them as they are, and `test_vllm_engine.py` a whole engine, also of 0.26 on a GPU machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from penstock.plugin import compat
from penstock.plugin.cores import CoreCalls, settle
from penstock.plugin.hooks import MARK, RequestHooks, TokenVersions
from penstock.types import SamplingParams
from penstock.wire import FINAL_ONLY, PROGRESS_HEADER, SPANS_HEADER, generate_body


class State:
    """A RequestState; its detokenizer and its logprobs are one list of ids."""

    def __init__(self, request_id: str, external: str, index: int) -> None:
        self.request_id = request_id
        self.parent_req = SimpleNamespace(external_req_id=external, n=2)
        self.request_index = index
        self.detokenizer = self
        self.logprobs_processor = SimpleNamespace(logprobs=None)
        self.output_token_ids: list[int] = []
        self.lora_name: str | None = None

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def make_request_output(self, new, _pooling, finish, _stop):
        return (len(new), finish)


class Engine:
    """An AsyncLLM of vLLM 0.26, and the application before it: `during` plays what happens in one HTTP request."""

    def __init__(self) -> None:
        self.request_states: dict[str, State] = {}
        self.output_processor = self
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue(), add_request_async=None)
        self.vllm_config = SimpleNamespace(model_config=None)

    def add_request(self, request, _prompt, _parent, index, _queue) -> None:
        self.request_states[request.request_id] = State(request.request_id, request.external_req_id, index)

    def sample(self, external: str, index: int = 0) -> State:
        params = SimpleNamespace(structured_outputs=None, prompt_logprobs=None, extra_args=None)
        key = f"{index}_{external}"
        request = SimpleNamespace(
            request_id=key, external_req_id=external, sampling_params=params, prompt_token_ids=[1], lora_request=None
        )
        self.add_request(request, None, None, index, None)
        return self.request_states[key]

    @staticmethod
    def process_outputs(outputs) -> list[str]:
        return [output.request_id for output in outputs]

    @staticmethod
    def step(state: State, tokens: int, finish: str | None = None) -> None:
        state.output_token_ids += [7] * tokens
        assert state.make_request_output([7] * tokens, None, finish, None) == (tokens, finish), "vLLM's own answer"


def mark_of(**said: Any) -> Any:
    return SimpleNamespace(request_id=MARK + json.dumps(said))


STREAM = b"text/event-stream; charset=utf-8"
SSE = (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


async def serve(
    spans, engine, during, *, headers=(), kind=b"application/json", bodies=(b'{"vllm": 1}',), status=200,
    path="/v1/completions",
):  # fmt: skip
    """The messages of one request through the plugin."""
    sent = []

    async def app(_scope, _receive, send):
        await during()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        for i, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": i + 1 < len(bodies)})

    async def send(message):
        sent.append(message)

    app_of_vllm = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": app_of_vllm}
    await spans.pass_on(app, scope, None, send)
    return sent


def header(sent):
    value = {k.decode().lower(): v for k, v in sent[0]["headers"]}.get(SPANS_HEADER.lower())
    return None if value is None else orjson.loads(value)


def asked(value: str):
    return [(PROGRESS_HEADER.lower().encode(), value.encode())]


async def test_the_cores_mark_among_its_outputs_is_the_version_from_there_on():
    spans, engine = RequestHooks(), Engine()

    async def during():
        sample = engine.sample("generate-tokens-x")
        engine.step(sample, 3)
        mark = mark_of(version=4)
        assert engine.process_outputs([mark]) == [mark.request_id], "vLLM passes over a request that it does not know"
        engine.step(sample, 2)

    assert header(await serve(spans, engine, during)) == [[[0, 0, 3], [4, 3, 5]]]


async def test_tokens_of_an_adapter_are_counted_under_its_own_version_in_their_core():
    spans, engine = RequestHooks(), Engine()

    async def during():
        sample, base = engine.sample("generate-tokens-x"), engine.sample("generate-tokens-x", 1)
        sample.lora_name = "ä:1"
        engine.step(sample, 1)
        for core, version, tokens in ((0, 1, 2), (1, 9, 1), (0, 2, 3)):
            engine.process_outputs([mark_of(engine_index=core, adapter="ä:1", adapter_version=version)])
            engine.step(sample, tokens)
            engine.step(base, 1)

    def notes(version: int) -> dict[str, Any]:
        return {"adapter": "ä:1", "adapter_version": version}

    assert header(await serve(spans, engine, during)) == [
        [[0, 0, 1, {"adapter": "ä:1"}], [0, 1, 4, notes(1)], [0, 4, 7, notes(2)]],
        [[0, 0, 3]],
    ]


async def test_prompts_stay_in_order_and_a_sample_without_tokens_has_no_span():
    spans, engine = RequestHooks(), Engine()

    async def during():
        for prompt in reversed(range(12)):
            for index in range(2):
                state = engine.sample(f"cmpl-a-client's-own-{prompt}", index)
                if (prompt, index) != (3, 0):
                    engine.step(state, 1 + prompt)

    given = header(await serve(spans, engine, during))
    assert [s[0][2] if s else 0 for s in given] == [0 if (p, i) == (3, 0) else 1 + p for p in range(12) for i in (0, 1)]


async def test_a_header_too_long_for_clients_is_left_out():
    spans, engine = RequestHooks(), Engine()

    async def during():
        for prompt in range(1000):
            engine.step(engine.sample(f"cmpl-x-{prompt}"), 1)

    assert header(await serve(spans, engine, during)) is None


@pytest.mark.parametrize("headers", [(), asked("stream")])
async def test_a_stream_has_progress_before_its_event_where_asked_and_versions_before_done(headers):
    spans, engine = RequestHooks(), Engine()

    async def during():
        engine.step(engine.sample("cmpl-x-0"), 2, "stop")

    sent = await serve(spans, engine, during, kind=STREAM, bodies=SSE, headers=headers)
    body = b"".join(m["body"] for m in sent[1:])
    if headers:
        comment, _, body = body.partition(b"\n\n")
        (update,) = orjson.loads(comment.removeprefix(b": penstock "))["samples"]
        assert (update["ids"], update["versions"], update["finish"]) == ([7, 7], [[0, 2]], "stop")
        assert update["asked"] is False
    assert body == SSE[0] + b': penstock {"versions":[[[0,0,2]]]}\n\n' + SSE[1]


async def test_who_asks_is_told_every_so_many_tokens_and_then_the_whole_answer():
    spans, engine = RequestHooks(), Engine()

    async def during():
        first, second = engine.sample("cmpl-x-0"), engine.sample("cmpl-x-0", 1)
        for step in range(10):
            spans.versions.version = step // 3
            engine.step(first, 1)
            if step < 2:
                engine.step(second, 1, "stop" if step else None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    sent = await serve(spans, engine, during, headers=asked("4"))
    assert dict(sent[0]["headers"])[b"content-type"] == b"application/x-ndjson"
    assert not sent[-1]["more_body"]
    *chunks, last = [orjson.loads(line) for line in b"".join(m["body"] for m in sent[1:]).splitlines()]
    told = [[(one["index"], len(one["ids"])) for one in chunk["samples"]] for chunk in (*chunks, last)]
    assert told == [[(0, 4), (1, 2)], [(0, 4)], [(0, 2)]]
    assert [one["versions"] for one in chunks[1]["samples"]] == [[[1, 2], [2, 2]]]
    assert (last["status"], last["answer"]) == (200, {"vllm": 1})
    assert last["versions"] == [[[0, 0, 3], [1, 3, 6], [2, 6, 9], [3, 9, 10]], [[0, 0, 2]]]


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
async def test_logprobs_of_the_token_endpoint_name_their_tokens(path):
    """In an answer of one piece, however vLLM sends it; text that looks like an id is left alone."""
    answer = b'{"logprobs":{"content":[{"token_id":57,"logprob":-1.0}]},"text":"\\"token_id\\":1"}'
    spans, engine = RequestHooks(), Engine()

    async def during():
        engine.step(engine.sample("generate-tokens-x"), 1, "stop")

    sent = await serve(spans, engine, during, path=path, bodies=(answer[:20], answer[20:]))
    body = b"".join(message.get("body", b"") for message in sent)
    if path == "/v1/completions":
        assert body == answer
        return
    assert body == answer.replace(b'"token_id":57', b'"token":"token_id:57","token_id":57')
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert header(sent) == [[[0, 0, 1]]]


async def test_a_logprob_that_is_no_number_has_the_value_of_vllms_answers():
    spans, engine = RequestHooks(), Engine()

    async def during():
        sample = engine.sample("generate-tokens-x")
        entries = [SimpleNamespace(logprob=p, rank=1, decoded_token=None) for p in (-0.5, -math.inf, math.nan)]
        sample.logprobs_processor.logprobs = [{7: entry} for entry in entries]
        engine.step(sample, 3, "stop")

    (news,) = orjson.loads((await serve(spans, engine, during, headers=asked("0")))[-1]["body"])["samples"]
    assert [position[0][1] for position in orjson.loads(news["logprobs"])] == [-0.5, -9999.0, -9999.0]


async def test_an_error_before_the_first_chunk_is_vllms_own_and_one_after_it_comes_in_the_last_line():
    async def nothing():
        pass

    spans, engine = RequestHooks(), Engine()
    sent = await serve(spans, engine, nothing, headers=asked("4"), status=400, bodies=(b'{"error"', b": 1}"))
    assert (sent[0]["status"], sent[1]["body"]) == (400, b'{"error": 1}')

    async def during():
        engine.step(engine.sample("cmpl-x-0"), 5)
        await asyncio.sleep(0.01)

    sent = await serve(spans, engine, during, headers=asked("4"), status=500, bodies=(b"gone",), kind=b"text/plain")
    last = orjson.loads(sent[-1]["body"])
    assert (sent[0]["status"], last["status"], last["answer"]) == (200, 500, "gone")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/abort_requests", b"{}", True),
        ("/abort_requests", b'{"request_ids": ["cmpl-x-0"]}', True),
        ("/inference/v1/abort_requests", b'{"request_ids": ["cmpl-w-0", "cmpl-x-0"]}', True),
        ("/abort_requests", b'{"request_ids": ["cmpl-w-0"]}', False),
        ("/abort_requests", b'{"request_ids": "cmpl-w-0"}', False),
        ("/abort_requests", b"no JSON", False),
        ("/abort_requests", b"[1, 2]", False),
    ],
)
async def test_an_abort_that_somebody_asks_for_is_told_from_one_of_a_pause(path, body, named):
    spans, engine = RequestHooks(), Engine()
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}

    pieces = [{"body": body[:4], "more_body": True}, {"body": body[4:]}]

    async def receive():
        return pieces.pop(0)

    async def abort(_scope, receive, _send):
        assert (await receive())["body"] + (await receive())["body"] == body, "vLLM reads it too"
        engine.step(next(iter(engine.request_states.values())), 0, "abort")

    async def during():
        engine.step(engine.sample("cmpl-x-0"), 1)
        await spans.pass_on(abort, scope, await CoreCalls(spans).lead(scope, receive), None)

    sent = await serve(spans, engine, during, headers=asked("0"))
    (news,) = orjson.loads(sent[-1]["body"])["samples"]
    assert (news["finish"], news["asked"]) == ("abort", named), "of another's abort nobody ends who is cut later"


async def test_after_a_pause_everything_made_before_it_is_counted():
    engine, processed = Engine(), []
    outputs_queue = engine.engine_core.outputs_queue

    async def handler():  # as AsyncLLM's output handler: it yields to the loop between portions of one batch
        while True:
            for outputs in await outputs_queue.get():
                processed.extend(outputs)
                await asyncio.sleep(0)

    task = asyncio.create_task(handler())
    engine.request_states = dict.fromkeys(map(str, range(300)))
    outputs_queue.put_nowait([["a"], ["b"], ["c"]])
    outputs_queue.put_nowait([["d"]])
    await settle(engine)
    assert processed == ["a", "b", "c", "d"]
    task.cancel()


def test_a_request_asks_for_one_answer_at_the_end():
    """What vLLM 0.26 needs to return every sample of an n-way request."""
    assert generate_body([1, 2], SamplingParams(n=2))["sampling_params"]["output_kind"] == FINAL_ONLY == 2


@pytest.mark.vllm
def test_the_version_of_one_that_does_not_is_kept_and_marked_among_its_outputs_to_every_client() -> None:
    class Core(SimpleNamespace):
        """As much of vLLM 0.26's EngineCoreProc as a label needs."""

    compat.add_labels(Core)
    core: Any = Core(output_queue=queue.Queue(), addresses=SimpleNamespace(outputs=["a", "b"]))
    core.set_weight_version("7")
    assert core.get_weight_version() is None, "it does not see a native update"
    marks = [core.output_queue.get_nowait() for _ in "ab"]
    assert [client for client, _ in marks] == [0, 1]

    passed: list[str] = []
    versions = TokenVersions()
    processor = SimpleNamespace(process_outputs=lambda outputs: passed.extend(o.request_id for o in outputs))
    versions.install(processor)
    processor.process_outputs(marks[0][1].outputs)
    assert (versions.version, passed) == (7, [f'{MARK}{{"version": 7}}'])
    assert versions.of_newest(SimpleNamespace()) == 7
    assert versions.of_newest(SimpleNamespace(weight_version_starts=[("default", 0), ("3", 5)])) == 3
