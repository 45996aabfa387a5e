"""Servers that answer something else, and batches that are not what they look like: one clear error of ours."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from penstock.engine.capabilities import Capabilities
from penstock.engine.client import DataClient
from penstock.engine.control import ControlClient
from penstock.engine.vanilla.requests import VanillaReplies
from penstock.errors import DeadlineError, EngineDeadError, EngineError, RequestError
from penstock.router.admin_client import RouterAdmin
from penstock.types import GenerateBatch, GenerateOutput, SamplingParams

INFO = (
    b'{"engine": "vllm", "vllm": "0.32.0", "weight_version": 3, "paused": false, "tp": 1, "pp": 1, "dp": 1, '
    b'"vocab_size": 32, "max_model_len": 64, "transports": ["shared_memory"], '
    b'"logprobs_mode": "processed_logprobs", "of a later version": 1}'
)


@asynccontextmanager
async def answering(body: bytes, kind: bytes = b"application/json") -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (kind, len(body)) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"engine": "other"}', b"[1]", b""])
async def test_a_server_that_is_no_engine_is_said_to_be_none(body: bytes) -> None:
    async with answering(body) as url:
        control = ControlClient("e0", url)
        with pytest.raises(EngineError, match=r"engine e0: .*answered"):
            await control.info()
        await control.close()


async def test_an_answer_that_is_not_json_is_the_engines_fault() -> None:
    async with answering(b"<html>") as url:
        data = DataClient(url, name="e0")
        with pytest.raises(EngineError, match="engine e0: answered b'<html>', which is not JSON"):
            await data.sample([1], 1)
        await data.close()


def chunk(index: int, *ids: int, finish: str | None = None) -> dict[str, object]:
    return {"index": index, "ids": ids, "logprobs": None, "versions": [[0, len(ids)]], "finish": finish}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([chunk(0, 5, 6), chunk(0, 7, finish="stop"), chunk(1, 8, finish="length")], None),
        ([chunk(0, 7, finish="stop"), chunk(1, 8, finish="length")], "made 3 tokens of a sample but reported 1"),
        (
            [chunk(0, 5, 6), chunk(0, 5, 6, 7, finish="stop"), chunk(1, 8, finish="length")],
            "made 3 tokens .* reported 5",
        ),
        ([chunk(1, 5, 6), chunk(0, 7, finish="stop"), chunk(1, 8, finish="length")], "made 3 tokens .* reported 1"),
        ([chunk(0, 5, 6), chunk(0, 7, finish="stop")], "reported 0 tokens of it and no end"),
    ],
    ids=["whole", "lost", "twice", "another's", "missing"],
)
async def test_told_samples_are_those_that_the_engine_has_made(told: list[object], message: str | None) -> None:
    last = {"status": 200, "samples": told[1:], "versions": [[[0, 0, 3]], [[0, 0, 1]]], "answer": {"choices": []}}
    lines = b"".join(orjson.dumps(line) + b"\n" for line in ({"samples": told[:1]}, last))
    async with answering(lines, b"application/x-ndjson") as url:
        data = DataClient(url)
        asked = data.sample([1], 2, SamplingParams(logprobs=False, detokenize=False))
        if message is None:
            assert [sample.token_ids for sample in await asked] == [(5, 6, 7), (8,)]
        else:
            with pytest.raises(EngineError, match=message):
                await asked
        await data.close()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"])
@pytest.mark.parametrize("call", ["tokenize", "detokenize"])
async def test_text_is_asked_for_again_where_its_server_dies(call: str, first: bytes) -> None:
    body = b'{"tokens": [1], "prompt": "a"}'
    answers = [first, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        data = DataClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await (data.tokenize("a") if call == "tokenize" else data.detokenize([1])) in ([1], "a")
        await data.close()


async def test_what_is_made_again_has_its_own_stop_string() -> None:
    """Its engine has told how it ended, and died; the next one has not our plugin, and makes another."""
    told = {"samples": [{**chunk(0, 5, 6, finish="stop"), "stop_reason": "b"}]}
    versions = [{"version": "default", "start": 0, "end": 3}]
    choice = {"index": 0, "token_ids": [7, 8, 9], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    made = {"choices": [{**choice, "weight_versions": versions}]}
    text = {"prompt": "abc"}
    answers = [(b"application/x-ndjson", told), (b"application/json", made), (b"application/json", text)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        kind, body = answers.pop(0)
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %s\r\n\r\n"
        writer.write(head % kind + orjson.dumps(body) + b"\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        data = DataClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", vocab_size=32)
        data.state.unreported = VanillaReplies(lambda: [("e1", Capabilities(plugin=False))])
        (sample,) = await data.sample([1], 1, SamplingParams(logprobs=False, stop=("b",), min_tokens=3))
        assert (sample.token_ids, sample.text) == ((7, 8, 9), "abc"), "a stop string before `min_tokens` ends nothing"
        await data.close()


async def test_what_vllm_ends_by_an_error_of_its_own_goes_on_from_what_it_had() -> None:
    """Its answer is 500, and the sample's end `error`: taken up with that end, it would be 500 everywhere."""
    first = {"samples": [chunk(0, 5, 6)]}, {
        "status": 500, "samples": [chunk(0, finish="error")], "versions": [[[0, 0, 2]]], "answer": {"error": {}}
    }  # fmt: skip
    last = {"status": 200, "samples": [chunk(0, 7, finish="length")], "versions": [[[0, 0, 3]]], "answer": {}}
    answers, asked = [first, (last,)], list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"}}"))
        body = b"".join(orjson.dumps(line) + b"\n" for line in answers.pop(0))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/x-ndjson\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        data = DataClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        (sample,) = await data.sample([1], 1, SamplingParams(logprobs=False, detokenize=False))
        assert (sample.token_ids, sample.finish_reason) == ((5, 6, 7), "length")
        assert b'\\"finish\\":null' in asked[1]
        await data.close()


async def test_text_has_the_deadline_of_its_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = DataClient(f"http://127.0.0.1:{silent.getsockname()[1]}", request_timeout_s=0.2)
        with pytest.raises(DeadlineError, match="no answer to POST /tokenize within"):
            await data.tokenize("a")
        with pytest.raises(DeadlineError, match="no time is left for /detokenize"):
            await data.detokenize([1], end=0.0)
        await data.close()


async def test_what_a_later_engine_says_besides_is_not_read() -> None:
    async with answering(INFO) as url:
        control = ControlClient("e0", url)
        info = await control.info()
        assert (info.weight_version, info.transports) == (3, ("shared_memory",))
        await control.close()


async def test_any_body_of_a_good_status_is_good_health() -> None:
    async with answering(b"OK\xff") as url:
        control = ControlClient("e0", url)
        await control.health(5.0)
        await control.close()


async def test_a_health_check_waits_as_long_as_its_caller_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        control = ControlClient("e0", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
            await control.health(0.2)
        await control.close()


async def test_a_router_whose_address_cannot_be_reached_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr("aiohttp.ClientSession.request", reset)
    admin = RouterAdmin("http://127.0.0.1:1")
    with pytest.raises(EngineDeadError, match="is gone"):
        await admin.health()
    await admin.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": "hello"}, r"prompts is one string; give a list of prompts: \['hello'\]"),
        ({"prompts": [{"role": "user", "content": "hi"}]}, r"prompts\[0\] is one message"),
        ({"prompt_token_ids": [1, 2]}, r"prompt_token_ids\[0\] is 1; give a list of token ids for each prompt"),
        ({"prompt_token_ids": [[1], []]}, r"prompt_token_ids\[1\] is empty"),
        (
            {"prompts": {"prompts": ["a"], "n": 1}},
            r"prompts is a mapping with the keys \['prompts', 'n'\]; give a list",
        ),
        ({"prompt_token_ids": {7: [1]}}, r"prompt_token_ids is a mapping with the keys \['7'\]"),
        ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "exactly one of prompts and prompt_token_ids; .* has both"),
        ({"sampling_params": {"n": 1}}, "exactly one of prompts and prompt_token_ids; .* has neither"),
    ],
)
def test_one_prompt_is_not_taken_for_a_batch(given, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        GenerateBatch(**given)
    with pytest.raises(RequestError, match=says):
        GenerateBatch.of(given)


def test_an_output_is_read_as_a_mapping_too() -> None:
    output = GenerateOutput.of([])
    assert output["responses"] is output.responses
    assert output["response_logprobs"] == output.response_logprobs
    with pytest.raises(KeyError, match="generate gives no 'texts'; known: responses, response_ids, stop_reasons, "):
        output["texts"]
