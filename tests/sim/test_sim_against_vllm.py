"""The simulated engine's answers are read by vLLM's own response models, without a field too many or a missing one."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec

import pytest
from sim_http import sim_client

from penstock.sim.config import SimConfig

CHECK = """
import json, sys
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.scale_out.token_in_token_out import protocol as tokens
from vllm.entrypoints.serve.engine import protocol as engine
from vllm.entrypoints.serve.tokenize import protocol as tokenize

modules = (chat, completion, tokens, engine, tokenize)
wrong = {}
for name, whole, answer in json.load(sys.stdin):
    model = next(getattr(m, name) for m in modules if hasattr(m, name))
    read = model.model_validate(answer).model_dump()
    def compare(given, known, path):
        if isinstance(given, dict):
            wrong.setdefault(path, []).extend(sorted(given.keys() - known.keys()))
            if whole:
                wrong[path].extend("missing " + key for key in sorted(known.keys() - given.keys()))
            for key in given.keys() & known.keys():
                compare(given[key], known[key], path + "." + key)
        elif isinstance(given, list):
            for one, other in zip(given, known, strict=True):
                compare(one, other, path + "[]")
    compare(answer, read, name)
print(json.dumps({path: fields for path, fields in wrong.items() if fields}))
"""

SAMPLING = """
import json, sys
from pydantic import TypeAdapter
from vllm.sampling_params import SamplingParams

adapter = TypeAdapter(SamplingParams)

def taken(given):
    try:
        adapter.validate_python(given)
    except Exception:  # of vLLM 0.32 its own, no ValueError
        return False
    return True

print(json.dumps([taken(given) for given in json.load(sys.stdin)]))
"""
SAMPLINGS = [
    {"n": "2"}, {"n": "2", "temperature": 0}, {"n": 2.0}, {"n": 2.5}, {"n": None}, {"n": "x"}, {"stop": ""},
    {"stop": ["a", ""]}, {"stop": "ab"}, {"stop": 5}, {"ignore_eos": 1}, {"ignore_eos": "true"}, {"ignore_eos": 2},
    {"temperature": "0.5"}, {"temperature": "nan"}, {"temperature": -1}, {"max_tokens": 5.0}, {"max_tokens": 0},
    {"seed": "3"}, {"stop_token_ids": ["3"]}, {"stop_token_ids": 3}, {"top_k": -1}, {"top_k": -2}, {"min_p": 2},
    {"repetition_penalty": 0}, {"presence_penalty": 5}, {"min_tokens": 9, "max_tokens": 3},
    {"temperature": 1e-6, "n": 2},
]  # fmt: skip

OUTCOMES = ([200, True], [400, False])


async def answers():
    """Name of vLLM's model, whether every field of it must be there, and an answer."""
    tokens = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
    prompt = {"prompt": "hi", "max_tokens": 3, "logprobs": 0, "return_token_ids": True}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    async with sim_client(SimConfig(plain=True)) as sim:  # our plugin adds the names of the tokens
        yield "GenerateTokensResponse", True, await sim.post("/inference/v1/generate", tokens)
        for event in (await sim.events("/inference/v1/generate", {**tokens, "stream": True}))[:-1]:
            yield "GenerateTokensStreamResponse", False, event
    async with sim_client() as sim:
        yield "CompletionResponse", True, await sim.post("/v1/completions", prompt)
        yield "ChatCompletionResponse", False, await sim.post("/v1/chat/completions", chat)
        yield "ModelList", True, await sim.get("/v1/models")
        yield "TokenizeResponse", True, await sim.post("/tokenize", {"prompt": "a"})
        yield "DetokenizeResponse", True, await sim.post("/detokenize", {"tokens": [3]})
        yield "ErrorResponse", True, (await sim.call("POST", "/v1/completions", {}))[1]
        streams = {
            "CompletionStreamResponse": ("/v1/completions", prompt),
            "ChatCompletionStreamResponse": ("/v1/chat/completions", chat),
        }
        for name, (path, body) in streams.items():
            options = {"include_usage": True}
            for event in (await sim.events(path, {**body, "stream": True, "stream_options": options}))[:-1]:
                yield name, False, event


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
async def test_vllms_own_models_read_every_answer():
    assert await said_by_vllm(CHECK, [answer async for answer in answers()]) == {}


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
async def test_sampling_parameters_are_taken_and_refused_as_by_vllm():
    async with sim_client() as sim:
        bodies = [{"token_ids": [1], "sampling_params": {"max_tokens": 3, **given}} for given in SAMPLINGS]
        statuses = [(await sim.call("POST", "/inference/v1/generate", body))[0] for body in bodies]
    taken = await said_by_vllm(SAMPLING, [body["sampling_params"] for body in bodies])
    outcomes = zip(SAMPLINGS, statuses, taken, strict=True)
    wrong = [(given, *outcome) for given, *outcome in outcomes if outcome not in OUTCOMES]
    assert not wrong
    assert {*statuses} == {200, 400}


async def said_by_vllm(program, given):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(400):
            out, err = await process.communicate(json.dumps(given).encode())
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])
