"""Forced tool calls on a real vLLM engine: a model of noise calls the tools that it has to, over every wire."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chat_model import save_chat_tokenizer
from gateway_rig import KEY, auth, calls_of
from http_engine import launched_engine
from nano_models import logprobs_of, save_dense
from penstock.gateway.app import build_app
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.tokenizer import load_tokenizer
from penstock.settings import EngineConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("add", "sub")]
CONTEXT = 2048
QUESTION = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Gateway, Path]]:
    """A gateway over one engine, whose model has random weights."""
    model = save_chat_tokenizer(save_dense(tmp_path_factory.mktemp("nano")))
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    config = EngineConfig(model=str(model), max_model_len=CONTEXT, dtype="float32", profile="cpu")
    options = GatewayOptions("m", CONTEXT, sampling={"seed": 1}, max_tokens=300)
    async with launched_engine(config, "e", tmp_path_factory.mktemp("logs"), api_key=KEY) as (engine, _):
        yield Gateway(engine, ChatTemplate(load_tokenizer(model)), options, [Tenant("a", KEY)]), model


async def test_a_model_of_noise_makes_the_calls_it_has_to(gateway: tuple[Gateway, Path]) -> None:
    """Each token is one that the grammar allows, with the model's logprob among those allowed."""
    served, path = gateway
    grammars: list[str] = []
    sample: Any = served._sample

    async def noted(ids: Any, n: int, params: Any, session: str) -> Any:
        grammars.append(params.structured_outputs["structural_tag"])
        return await sample(ids, n, params, session)

    served._sample = noted
    chat = [{"type": "function", "function": function} for function in FUNCTIONS]
    responses = [{"type": "function", **function} for function in FUNCTIONS]
    messages = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
    transport = httpx.ASGITransport(build_app(served))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=auth(KEY), timeout=120
    ) as http:
        for url, body, any_one, named in (
            ("/v1/chat/completions", {"messages": QUESTION, "tools": chat}, "required",
             {"type": "function", "function": {"name": "sub"}}),
            ("/v1/responses", {"input": "go", "tools": responses}, "required", {"type": "function", "name": "sub"}),
            ("/v1/messages", {"messages": QUESTION, "tools": messages, "max_tokens": 300}, {"type": "any"},
             {"type": "tool", "name": "sub"}),
        ):  # fmt: skip
            for choice, names in ((any_one, {"add", "sub"}), (named, {"sub"})):
                answer = await http.post(url, json={**body, "tool_choice": choice})
                assert answer.status_code == 200, answer.text
                calls = calls_of(answer.json())
                assert calls, answer.text
                assert len(calls) == 1 or choice is any_one
                assert {name for name, _ in calls} <= names
                assert all(0 <= given["a"] <= 99 and given["b"] in "xy" for _, given in calls)
        rows = [json.loads(line) for line in (await http.get("/sessions/default/rows")).text.splitlines()]
    assert len(rows) == 6
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    for row, grammar in zip(rows, grammars, strict=True):
        assert [node["constrained"] for node in row["nodes"]] == [True]
        under = logprobs_under(grammar, path, model, row["prompt_ids"], row["response_ids"])
        assert row["logprobs"] == pytest.approx(under, abs=1e-4)
        free = logprobs_of(model, row["prompt_ids"], row["response_ids"])
        assert any(abs(a - b) > 1e-2 for a, b in zip(under, free, strict=True))
        assert sum(logprob == 0.0 for logprob in row["logprobs"]) > 8  # the grammar left one token


def logprobs_under(grammar: str, path: Path, model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Replay a turn: the model's logprobs, with what the grammar forbids at each place left out."""
    import xgrammar

    vocabulary = model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(path), vocab_size=vocabulary)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(grammar))
    mask = xgrammar.allocate_token_bitmask(1, vocabulary)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    found: list[float] = []
    for row, token in zip(logits, response, strict=True):
        matcher.fill_next_token_bitmask(mask)
        xgrammar.apply_token_bitmask_inplace(row, mask[0])
        found.append(float(row.log_softmax(-1)[token]))
        assert matcher.accept_token(token)
    return found
