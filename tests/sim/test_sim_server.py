"""The simulated engine over HTTP: vLLM's shapes, errors and control calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import aiohttp
import orjson
import pytest
from sim_http import PROMPT, sim_client

from patience import WAIT_S
from penstock.sim import SimConfig, SimServer
from penstock.wire import RESUME_ARG


@pytest.fixture(scope="module")
async def sim():
    async with sim_client() as client:
        yield client


def generate_body(**extra):
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12, "n": 2, "seed": 4, "logprobs": 0}, **extra}


@pytest.mark.parametrize(("option", "says"), [("tokens=3", "unknown config key"), ("tokens", "form key=value")])
def test_a_bad_option_of_the_process_is_one_line_and_status_2(option, says):
    argv = [sys.executable, "-m", "penstock.sim", option]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


async def test_generate_streams_the_same_and_tells_versions_once(sim):
    whole = await sim.post("/inference/v1/generate", generate_body())
    options = {"include_usage": True}
    *chunks, usage, done = await sim.events(
        "/inference/v1/generate", generate_body(stream=True, stream_options=options)
    )
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 24
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [i for c in mine for i in c["token_ids"]] == choice["token_ids"]
        assert [e for c in mine for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * 11 + ["length"]
        assert [c["weight_versions"] for c in mine] == [None] * 11 + [choice["weight_versions"]]


async def test_completions_take_every_form_of_prompt(sim):
    async def choices(prompt):
        body = {"prompt": prompt, "max_tokens": 5, "logprobs": 0, "return_token_ids": True}
        return (await sim.post("/v1/completions", body))["choices"]

    one, two = (await choices("abc"))[0], (await choices("xy"))[0]
    ids = one["prompt_token_ids"]
    assert ids == (await sim.post("/tokenize", {"prompt": "abc"}))["tokens"]
    assert [c["text"] for c in await choices(["abc", "xy"])] == [one["text"], two["text"]]
    assert await choices(ids) == [one]
    assert [c["token_ids"] for c in await choices([ids, two["prompt_token_ids"]])] == [
        one["token_ids"],
        two["token_ids"],
    ]
    assert one["text"] == (await sim.post("/detokenize", {"tokens": one["token_ids"]}))["prompt"]
    assert len(one["logprobs"]["token_logprobs"]) == 5


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("/inference/v1/generate", {"token_ids": [1024], "sampling_params": {}}, 400, "BadRequestError", "vocab"),
        ("/inference/v1/generate", {"token_ids": [1]}, 400, "BadRequestError", "sampling_params"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4096}, 400, "BadRequestError", "maximum context length"),
        ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, 400, "BadRequestError", "n must be 1 when"),
        ("/v1/completions", {"prompt": "x", "n": 257}, 400, "BadRequestError", "max_num_seqs"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "NotFoundError", "`other` does not exist"),
        ("/v1/completions", {}, 400, "BadRequestError", "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "BadRequestError", "at least one message"),
        ("/v1/chat/completions", {"messages": [], "tool_choice": "required"}, 400, "BadRequestError", "no grammars"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, 400, "BadRequestError", "no grammars"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"extra_args": {RESUME_ARG: "[null]"}}}, 400,
         "BadRequestError", "a sample: Input should be a valid dictionary"),
        ("/pause?mode=maybe", None, 400, "BadRequestError", "mode"),
        ("/no/such/path", {}, 404, "Not Found", "Not Found"),
    ],
)  # fmt: skip
async def test_errors_have_vllms_form(sim, path, body, status, kind, words):
    got, answer = await sim.call("POST", path, body)
    assert (got, answer["error"]["code"], answer["error"]["type"]) == (status, status, kind)
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("plain", [False, True])
async def test_a_web_page_controls_nothing(plain: bool) -> None:  # noqa: FBT001
    async with SimServer(SimConfig(plain=plain)) as server, aiohttp.ClientSession() as session:
        for fields in ({"Origin": "http://evil", "Content-Type": "text/plain"}, {"Host": "evil.example"}):
            async with session.post(server.url + "/resume", headers=fields) as answer:
                assert (answer.status == 403) != plain, "our plugin's doing"
            async with session.post(server.url + "/v1/completions", data=b'{"prompt": "a"}', headers=fields) as answer:
                assert answer.status == 200


def figures(text: bytes) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#"))
    return {series.partition("{")[0]: float(value) for series, _, value in rows}


async def test_metrics_are_true():
    async with sim_client(SimConfig(max_num_seqs=2, kv_blocks=256)) as sim:
        await asyncio.gather(*(sim.generate(30, seed=i) for i in range(3)))
        idle = figures(await sim.get("/metrics"))
        assert (idle["vllm:num_requests_running"], idle["vllm:kv_cache_usage_perc"]) == (0, 0)
        assert idle["vllm:generation_tokens_total"] == 90
        assert idle["vllm:prompt_tokens_total"] == idle["vllm:prefix_cache_queries_total"] == 9
        assert idle["vllm:num_preemptions_total"] == 0


async def test_lora_calls(sim):
    load = {"lora_name": "style", "lora_path": "somewhere"}
    assert b"added successfully" in await sim.post("/v1/load_lora_adapter", load)
    assert [m["id"] for m in (await sim.get("/v1/models"))["data"]] == ["sim-model", "style"]
    answer = await sim.post("/v1/completions", {"model": "style", "prompt": "x", "max_tokens": 3})
    base = await sim.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert answer["model"] == "style"
    assert answer["choices"][0]["text"] != base["choices"][0]["text"]
    await sim.post("/v1/unload_lora_adapter", {"lora_name": "style"})
    assert (await sim.call("POST", "/v1/unload_lora_adapter", {"lora_name": "style"}))[0] == 404
    assert (await sim.call("POST", "/v1/completions", {"model": "style", "prompt": "x"}))[0] == 404


@pytest.mark.parametrize("chunk", ["0", "2"])
async def test_tokens_that_lines_have_told_are_not_in_their_answer(sim, chunk):
    asked = {"headers": {"X-Penstock-Progress": chunk}}
    whole = await sim.post("/inference/v1/generate", generate_body())
    answer = await sim.post("/inference/v1/generate", generate_body(), **asked)
    lines = [orjson.loads(line) for line in answer.splitlines()]
    told = [[], []]
    for one in (one for line in lines for one in line["samples"]):
        told[one["index"]] += one["ids"]
    assert told == [choice["token_ids"] for choice in whole["choices"]]
    light = [{**choice, "token_ids": [], "logprobs": {"content": []}} for choice in whole["choices"]]
    assert lines[-1]["answer"]["choices"] == light
    for other in ("stream", ""):
        answer = await sim.post("/inference/v1/generate", generate_body(), headers={"X-Penstock-Progress": other})
        assert answer["choices"] == whole["choices"], "no lines, so nothing was told"
    usage = lines[-1]["answer"]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, whole["usage"]["prompt_tokens"])

    body = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    whole = await sim.post("/v1/completions", body)
    answer = orjson.loads((await sim.post("/v1/completions", body, **asked)).splitlines()[-1])["answer"]
    assert (answer["choices"], answer["usage"]) == (whole["choices"], whole["usage"])
