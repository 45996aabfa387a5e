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
    given = [answer async for answer in answers()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHECK,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(400):
            out, err = await process.communicate(json.dumps(given).encode())
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    assert json.loads(out.splitlines()[-1]) == {}
