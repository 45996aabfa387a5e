"""Share of prompt tokens that a real engine finds in its cache: agents' turns through the gateway, and straight."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import _common
import httpx

from penstock import Fleet
from penstock.gateway.app import serving
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.tokenizer import load_tokenizer

KEY = "key-of-the-benchmark"
SESSIONS, TURNS = 8, 6
CONTEXT = 2048
FIGURE = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


async def counts(http: httpx.AsyncClient, url: str) -> tuple[float, float]:
    """Prompt tokens that the engine looked up, and that it found."""
    text = (await http.get(f"{url}/metrics")).text
    found = {"queries": 0.0, "hits": 0.0}
    for name, value in FIGURE.findall(text):
        found[name] += float(value)
    return found["queries"], found["hits"]


async def play(http: httpx.AsyncClient, url: str, system: str, number: int, model: str) -> None:
    """One session of several turns; the answer goes back as it came."""
    messages: list[Any] = [{"role": "system", "content": system}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"question {turn} of session {number}: " + "what then? " * 4})
        body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 1.0}
        answer = await http.post(url, json=body)
        answer.raise_for_status()
        message = answer.json()["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or ""})


async def rows(folder: Path, *, quick: bool) -> list[_common.Row]:
    """Ours by vLLM's own chat completions on one engine."""
    from chat_model import save_chat_tokenizer  # noqa: PLC0415 - _gateway_sides puts tests on the path
    from nano_models import save_dense  # noqa: PLC0415

    model = save_dense(folder / "nano")
    save_chat_tokenizer(model)
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    sessions = 2 if quick else SESSIONS
    shares: dict[str, list[float]] = {"gateway": [], "straight": []}
    async with (
        Fleet.launch(str(model), engines=1, profile="cpu", max_model_len=CONTEXT) as fleet,
        httpx.AsyncClient(timeout=120, headers={"Authorization": f"Bearer {KEY}"}) as http,
    ):
        engine: Any = (await fleet.engines())[0]
        served = (await http.get(f"{fleet.url}/v1/models")).json()["data"][0]["id"]
        gateway = Gateway(fleet, ChatTemplate(tokenizer), GatewayOptions(served, CONTEXT), [Tenant("a", KEY)])
        async with serving(gateway) as base:
            for turn in range(1 if quick else 3):
                for name, found in shares.items():
                    before = await counts(http, engine.url)
                    system = f"{name} {turn}: " + "be brief and kind. " * 6  # shared by its sessions alone
                    await asyncio.gather(
                        *(
                            play(
                                http,
                                f"{base}/s/{turn}-{i}/v1/chat/completions"
                                if name == "gateway"
                                else f"{fleet.url}/v1/chat/completions",
                                system,
                                i,
                                served,
                            )
                            for i in range(sessions)
                        )
                    )
                    after = await counts(http, engine.url)
                    found.append((after[1] - before[1]) / (after[0] - before[0]))
    _common.note(f"share of prompt tokens in the cache: {shares}")
    mean = {name: sum(values) / len(values) for name, values in shares.items()}
    return [
        _common.compare(
            "prompt tokens in the cache, by straight vLLM", mean["gateway"], mean["straight"], bar=1.0, want="at least"
        )
    ]
