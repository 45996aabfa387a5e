"""Servers that answer something else, and batches that are not what they look like: one clear error of ours."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from canned import LINES, answer, canned, client_of, full
from patience import WAIT_S
from penstock.engine.capabilities import Capabilities
from penstock.engine.client import DataClient
from penstock.engine.control import ControlClient
from penstock.engine.vanilla import VanillaReplies
from penstock.engine.verbs import EngineStats, engine_stats
from penstock.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineHTTPError,
    PenstockError,
    RequestError,
)
from penstock.http import ConnectTimeoutError, HttpTransport, UnreachableError
from penstock.router.membership import Membership
from penstock.router.state import RouterAdmin
from penstock.start_report import error_from_json, error_to_json
from penstock.types import GenerateBatch, GenerateOutput, SamplingParams

INFO = {
    "engine": "vllm", "vllm": "0.32.0", "weight_version": 3, "paused": False, "tp": 1, "pp": 1, "dp": 1,
    "vocab_size": 32, "max_model_len": 64, "transports": ["shared_memory"],
    "logprobs_mode": "processed_logprobs", "of a later version": 1,
}  # fmt: skip
TOKENS_ONLY = SamplingParams(logprobs=False, detokenize=False)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"engine": "other"}', b"[1]", b""])
async def test_a_server_that_is_no_engine_is_said_to_be_none(body: bytes) -> None:
    async with canned(answer(body)) as server:
        control = ControlClient("e0", server.url)
        with pytest.raises(EngineError, match=r"engine e0: .*answer"):
            await control.info()
        await control.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dp", None), ("dp", 0), ("dp", 2**40), ("dp", 1.0), ("dp", True), ("tp", {}), ("pp", -1),
        ("weight_version", "x"), ("weight_version", -1), ("paused", 1), ("vocab_size", None), ("max_model_len", []),
        ("transports", "x"), ("model", 5), ("instance", None), ("kv_kept", "x"), ("weight_transfer", 5),
        ("control_port", -1), ("control_port", "x"),
    ],
)  # fmt: skip
async def test_a_description_with_a_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    async with canned(answer({**INFO, key: value})) as server:
        control = ControlClient("e0", server.url)
        says = key.removeprefix("control_")
        with pytest.raises(EngineError, match=f"engine e0: malformed answer to GET /penstock/info: .*{says}"):
            await control.info()
        await control.close()


async def test_an_answer_that_is_not_json_is_the_engines_fault() -> None:
    async with client_of(answer(b"<html>"), name="e0") as data:
        with pytest.raises(EngineError, match="engine e0: answered b'<html>', which is not JSON"):
            await data.sample([1], 1)


def report(index: int, *ids: int, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"index": index, "ids": ids, "logprobs": None, "versions": [[0, len(ids)]], "finish": finish, **more}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([report(0, 5, 6), report(0, 7, finish="stop"), report(1, 8, finish="length")], None),
        ([report(0, 7, finish="stop"), report(1, 8, finish="length")], "made 3 tokens of a sample but reported 1"),
        ([report(0, 5, 6), report(0, 5, 6, 7, finish="stop"), report(1, 8, finish="length")], "made 3 .* reported 5"),
        ([report(1, 5, 6), report(0, 7, finish="stop"), report(1, 8, finish="length")], "made 3 .* reported 1"),
        ([report(0, 5, 6), report(0, 7, finish="stop")], "reported 0 tokens of it and no end"),
    ],
    ids=["whole", "lost", "twice", "another's", "missing"],
)
async def test_reported_samples_are_those_that_the_engine_made(reports: list[object], message: str | None) -> None:
    last = {"status": 200, "samples": reports[1:], "versions": [[[0, 0, 3]], [[0, 0, 1]]], "answer": {"choices": []}}
    async with client_of(answer([{"samples": reports[:1]}, last], LINES)) as data:
        asked = data.sample([1], 2, TOKENS_ONLY)
        if message is None:
            assert [sample.token_ids for sample in await asked] == [(5, 6, 7), (8,)]
        else:
            with pytest.raises(EngineError, match=message):
                await asked


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"])
@pytest.mark.parametrize("call", ["tokenize", "detokenize"])
async def test_text_is_asked_for_again_where_its_server_dies(call: str, first: bytes) -> None:
    async with client_of(first, answer({"tokens": [1], "prompt": "a"})) as data:
        assert await (data.tokenize("a") if call == "tokenize" else data.detokenize([1])) in ([1], "a")


async def test_what_is_made_again_has_its_own_stop_string() -> None:
    """Its engine reported how it ended, and died; the next one runs without our plugin and makes another."""
    reported = {"samples": [report(0, 5, 6, finish="stop", stop_reason="b")]}
    versions = [{"version": "default", "start": 0, "end": 3}]
    choice = {"index": 0, "token_ids": [7, 8, 9], "logprobs": None, "finish_reason": "length", "stop_reason": None}
    made = {"choices": [{**choice, "weight_versions": versions}]}
    async with client_of(answer([reported], LINES), answer(made), answer({"prompt": "abc"}), vocab_size=32) as data:
        data.unreported = VanillaReplies(lambda: [("e1", Capabilities(plugin=False))])
        (sample,) = await data.sample([1], 1, SamplingParams(logprobs=False, stop=("b",), min_tokens=3))
        assert (sample.token_ids, sample.text) == ((7, 8, 9), "abc"), "a stop string before `min_tokens` ends nothing"


async def test_what_vllm_ends_by_an_error_of_its_own_goes_on_from_what_it_had() -> None:
    """Its answer is 500, and the sample's end `error`: resumed with that end, it would be 500 everywhere."""
    failed = {"status": 500, "samples": [report(0, finish="error")], "versions": [[[0, 0, 2]]], "answer": {"error": {}}}
    last = {"status": 200, "samples": [report(0, 7, finish="length")], "versions": [[[0, 0, 3]]], "answer": {}}
    async with canned(answer([{"samples": [report(0, 5, 6)]}, failed], LINES), answer([last], LINES)) as server:
        data = DataClient(server.url)
        (sample,) = await data.sample([1], 1, TOKENS_ONLY)
        assert (sample.token_ids, sample.finish_reason) == ((5, 6, 7), "length")
        assert b'\\"finish\\":null' in server.bodies[1]
        await data.close()


async def test_text_has_the_deadline_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = DataClient(f"http://127.0.0.1:{silent.getsockname()[1]}", request_timeout_s=0.2)
        with pytest.raises(DeadlineError, match="no answer to POST /tokenize within"):
            await data.tokenize("a")
        with pytest.raises(DeadlineError, match="no time is left for /detokenize"):
            await data.detokenize([1], end=0.0)
        control = ControlClient("e0", data.http.url)
        with pytest.raises(DeadlineError, match=r"within 0\.2 s"):
            await control.health(0.2)
        await control.close()
        control = ControlClient("e0", data.http.url)
        monkeypatch.setattr("penstock.http.CONNECT_S", 1e-6)
        with pytest.raises(DeadlineError, match="no answer to GET /health within 1e-06 s"):
            await control.health(60.0)
        await control.close()
        await data.close()


async def test_one_deadline_spans_all_tries_of_a_request() -> None:
    async def half_an_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")

    async def back() -> bool:
        await asyncio.sleep(1.8)
        servers.append(await asyncio.start_server(half_an_answer, sock=port))
        return True

    servers, now = list[asyncio.Server](), asyncio.get_running_loop().time
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        http = HttpTransport(f"http://127.0.0.1:{port.getsockname()[1]}")
        http.back, began = back, now()
        with pytest.raises(DeadlineError, match="within 2 s"):
            await http.get("/", timeout_s=2.0)
        assert now() - began < 3.5, "the second try had a deadline of its own"
        for server in servers:  # none, if the machine stood still between the two
            server.close()
        await http.close()


async def test_a_request_is_sent_again_after_a_connection_that_did_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer({"served": 1}))

    async def back() -> bool:
        if not servers:
            servers.append(await asyncio.start_server(serve, sock=port))
        return True

    monkeypatch.setattr("penstock.http.CONNECT_S", 0.5)
    servers = list[asyncio.Server]()
    with full() as port:
        http = HttpTransport(f"http://127.0.0.1:{port.getsockname()[1]}")
        http.back = back
        assert await http.post("/", {}, timeout_s=WAIT_S) == {"served": 1}
        servers[0].close()
        await http.close()


@pytest.mark.parametrize("dropped", [False, True])
async def test_a_hidden_core_port_is_given_up_once_by_calls_in_flight(
    *, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.http.CONNECT_S", 0.5)
    with ExitStack() as there:
        hidden = there.enter_context(full() if dropped else socket.create_server(("127.0.0.1", 0)))
        port = hidden.getsockname()[1]
        if not dropped:
            hidden.close()
        info, done = answer({**INFO, "control_port": port}), answer({})
        async with canned(info, *[done] * 8, info, done) as server:
            control = ControlClient("e0", server.url)
            await control.info()
            calls = [control.at_core("/penstock/core/abort", {}) for _ in range(8)]
            assert await asyncio.gather(*calls, return_exceptions=True) == [{}] * 8
            there.close()
            if dropped:  # each try would take all of `CONNECT_S`
                with socket.create_server(("127.0.0.1", port)) as again:
                    again.setblocking(False)  # noqa: FBT003 - the module's own signature
                    await control.info()
                    assert await control.at_core("/penstock/core/abort", {}, 0.5) == {}
                    with pytest.raises(BlockingIOError):
                        again.accept()
            await control.close()


class OnlyHereError(PenstockError):
    status = 418


@pytest.mark.parametrize(
    "error",
    [ConnectTimeoutError("late", seconds=10.0), UnreachableError("nothing answers"), OnlyHereError("no tea")],
)
def test_an_error_of_these_clients_is_its_base_in_another_process(error: PenstockError) -> None:
    there = error_from_json(error_to_json(error))
    assert (type(there), str(there)) == (type(error).__base__, str(error))


async def test_what_a_later_engine_says_further_is_not_read() -> None:
    async with canned(answer(INFO), answer(b"OK\xff")) as server:
        control = ControlClient("e0", server.url)
        info = await control.info()
        assert (info.weight_version, info.transports) == (3, ("shared_memory",))
        await control.health(5.0)  # any body of a good status
        await control.close()


@pytest.mark.parametrize("line", [5, {}, {"samples": 5}, {"samples": [], "answer": {}}, {"samples": [{"index": 0}]}])
async def test_a_malformed_progress_report_is_the_engines_fault(line: object) -> None:
    async with client_of(answer([line], LINES), name="e0") as data:
        with pytest.raises(EngineError, match="engine e0: malformed progress report"):
            await data.sample([1], 1, TOKENS_ONLY)


async def test_a_router_whose_address_cannot_be_reached_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(*_: object, **__: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr("aiohttp.ClientSession.request", reset)
    admin = RouterAdmin("http://127.0.0.1:1")
    with pytest.raises(EngineDeadError, match="is gone"):
        await admin._call("GET", "/router/health")
    await admin.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompts": "hello"}, "prompts is of type str; give a list with one entry a prompt"),
        (
            {"prompts": [{"role": "user", "content": "hi"}]},
            r"prompts\[0\] is of type dict; a prompt is a string or a list of messages",
        ),
        ({"prompt_token_ids": [1, 2]}, r"prompt_token_ids\[0\] is 1; give a list of token ids for each prompt"),
        ({"prompt_token_ids": {7: [1]}}, "prompt_token_ids is of type dict; give a list"),
        ({"prompts": [[0, 5, 6]]}, r"prompts\[0\] holds 0, which is no message; give token ids as prompt_token_ids"),
        ({"prompts": [[None]]}, r"prompts\[0\] holds None, which is no message"),
        ({"prompts": [[""]]}, r"prompts\[0\] holds '', which is no message"),
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


RANK = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{rank}",model_name="a b"}} 2.0
vllm:num_requests_waiting{{engine="{rank}",model_name="a b"}} 1.0
vllm:kv_cache_usage_perc{{engine="{rank}",model_name="a b"}} 0.{rank}5
vllm:generation_tokens_total{{engine="{rank}",model_name="a b"}} 1.5e+06
vllm:generation_tokens_created{{engine="{rank}",model_name="a b"}} 1.7e+09
vllm:num_preemptions_total{{engine="{rank}",model_name="a b"}} 3.0
vllm:time_to_first_token_seconds_bucket{{engine="{rank}",le="+Inf",model_name="a b"}} 7.0
python_info{{version="3.12"}} 1.0
"""


def test_ranks_are_added_up_and_their_kv_usage_is_the_mean():
    text = "".join(RANK.format(rank=rank) for rank in range(2))
    assert engine_stats(text, "e0") == EngineStats(4, 2, pytest.approx(0.1), 3_000_000, 6)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "", "much"])
def test_figures_that_cannot_be_read_are_the_engines_error(value: str):
    text = RANK.format(rank=0).replace(" 1.5e+06", f" {value}")
    with pytest.raises(EngineError, match="engine e0: its /metrics cannot be read: "):
        engine_stats(text, "e0")


async def test_experts_go_with_the_sample_whose_they_are() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    with io.BytesIO() as buffer:
        np.save(buffer, rows, allow_pickle=False)
        text = base64.b64encode(buffer.getvalue()).decode()
    reports = [report(0, 5, 6, 7, finish="stop"), report(1, 8, finish="length")]
    choices = [{"index": 1, "routed_experts": text}, {"index": 0, "routed_experts": None}]
    spans = [[[0, 0, 3]], [[0, 0, 1]]]
    last = {"status": 200, "samples": reports, "versions": spans, "answer": {"choices": choices}}
    async with client_of(answer([last], LINES)) as data:
        first, second = await data.sample([1, 2], 2, TOKENS_ONLY)
    assert first.routed_experts is None
    assert np.array_equal(second.routed_experts, rows[:2]), "two tokens of the prompt had a forward pass"


def test_a_key_with_a_line_end_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError, match="a line end in its file") as caught:
        HttpTransport("http://127.0.0.1:1", api_key="s3cret\r")
    assert "s3cret" not in str(caught.value)


@asynccontextmanager
async def router_with(control_ports: Callable[[], object]) -> AsyncIterator[tuple[int, RouterAdmin]]:
    """A router that says at each question which ports these are: its own port, and a client of it."""

    async def health(request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers, "the program may be another one, and health needs no key"
        return web.json_response({"control_ports": control_ports()})

    router = web.Application()
    router.router.add_get("/router/health", health)
    async with TestServer(router) as server:
        admin = RouterAdmin(f"http://127.0.0.1:{server.port}", "key")
        yield server.port, admin
        await admin.close()


async def test_a_key_goes_once_at_most_to_a_program_that_took_a_dead_router_workers_port() -> None:
    asked: list[str | None] = []

    async def stranger(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Authorization"))
        raise web.HTTPNotFound

    taken = web.Application()
    taken.router.add_route("*", "/{path:.*}", stranger)
    async with TestServer(taken) as other, router_with(lambda: ports) as (port, admin):
        ports = [other.port, other.port]
        for _ in range(2):
            with pytest.raises(EngineHTTPError, match="answered 404"):
                await admin.engines()
            ports = [port]  # a router that has been started again
        assert asked == ["Bearer key"] * 2, "one call to each port, and none after it failed"


async def test_a_choice_is_asked_of_the_router_that_was_started_again() -> None:
    async def choose(_: web.Request) -> web.Response:
        return web.json_response({"engine": None})

    def control_server() -> TestServer:
        app = web.Application()
        app.router.add_post("/router/choose", choose)
        return TestServer(app)

    async with control_server() as again, router_with(lambda: [control.port]) as (_, admin):
        async with control_server() as control:
            assert await admin.choose() is None
        control = again
        assert await admin.choose() is None


@pytest.mark.parametrize("ports", [5, None, ["x"], [], [0], [65_536]])
async def test_control_ports_of_another_form_are_named(ports: object) -> None:
    async with router_with(lambda: ports) as (_, admin):
        for call in (admin.engines, admin.choose, lambda: admin.announce(Membership(1, ()))):
            with pytest.raises(EngineHTTPError, match=r"not as a router of this version does .*control_ports"):
                await call()


async def test_the_control_ports_of_a_url_without_a_port_are_on_its_host() -> None:
    admin = RouterAdmin("http://router.example")
    admin._call = lambda *_: asyncio.sleep(0, {"control_ports": [7]})  # type: ignore[method-assign, assignment]
    assert await admin._urls() == ["http://router.example:7"]


async def test_calls_at_the_same_time_close_the_connections_to_former_processes_once() -> None:
    closed: list[int] = []

    class Former:
        async def close(self) -> None:
            closed.append(1)
            await asyncio.sleep(0)

    admin = RouterAdmin("http://127.0.0.1:1")
    admin._transports |= {"http://127.0.0.1:2": Former(), "http://127.0.0.1:3": Former()}  # type: ignore[dict-item]
    admin._call = lambda *_: asyncio.sleep(0, {"control_ports": [7]})  # type: ignore[method-assign, assignment]
    assert await asyncio.gather(admin._urls(), admin._urls()) == [["http://127.0.0.1:7"]] * 2
    assert len(closed) == 2
