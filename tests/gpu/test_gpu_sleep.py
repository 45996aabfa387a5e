"""Sleep and wake on a GPU: memory goes and comes back, and what is served afterwards is right.

Run it with `TRITON_F32_DEFAULT=ieee` (fp32 attention without TF32). Further options for the engines come by
`PENSTOCK_TEST_ENGINE`, as in `tests/conftest.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import Qwen3Config

from char_tokenizer import save_char_tokenizer
from http_engine import HTTPEngine, launched_engine
from nano_models import MAX_LEN, History, changed, save_adapter, save_dense
from patience import asked
from penstock.engine.launch import EngineProcess
from penstock.settings import EngineConfig
from penstock.types import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(420),
]

GIB = 2**30
MIB = 2**20
KV_BYTES = 8 * GIB
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, detokenize=False)
PROMPT = [3 + i % 90 for i in range(160)]
"""Fills several blocks of the prefix cache."""


def used() -> int:
    """Bytes of the first GPU that anyone uses."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def host_bytes(group: int) -> int:
    """Resident anonymous memory of a process group: what a host copy of weights is in."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getpgid(int(status.parent.name)) == group:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
                total += int(fields["RssAnon"].split()[0]) * 1024
        except (ProcessLookupError, FileNotFoundError, KeyError):
            continue
    return total


def engine_config(model: Path, **options: Any) -> EngineConfig:
    given = json.loads(os.environ.get("PENSTOCK_TEST_ENGINE", '{"extra_args": {"attention-backend": "TRITON_ATTN"}}'))
    ours = {
        "model": str(model), "profile": "gpu", "max_model_len": MAX_LEN, "enforce_eager": True,
        "enable_sleep_mode": True, "kv_cache_memory_bytes": KV_BYTES, "gpu_memory_utilization": 0.3,
    }  # fmt: skip
    return EngineConfig(**{**given, **ours, **options})


@dataclass
class Sleeper:
    engine: HTTPEngine
    process: EngineProcess
    before: int
    """Bytes used on the GPU before it was launched."""
    history: History
    folder: Path
    """Of its checkpoint, its log and its adapter."""

    async def update(self, model: Any) -> str:
        """Put a model in force; returns the checksum of the weights."""
        report = await self.engine.update_weights(model.named_parameters())
        self.history.models[report.version] = model
        return report.engines[0].checksum

    async def tokens(self) -> tuple[int, ...]:
        return (await self.engine.sample([5, 6, 7], 1, GREEDY))[0].token_ids

    async def check_prefix(self) -> None:
        """A prompt that was cached before: stale or lost KV would show."""
        sample = (await self.engine.sample(PROMPT, 1, GREEDY))[0]
        assert self.history.worst_difference(PROMPT, sample) < 1e-4


async def _launched(config: EngineConfig, logs: Path, history: History) -> AsyncIterator[Sleeper]:
    before = used()
    async with launched_engine(config, "sleeper", logs) as (engine, process):
        yield Sleeper(engine, process, before, history, logs)


@pytest.fixture(scope="module")
async def large(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sleeper]:
    """2.5 GiB of made-up bf16 weights, so that it shows where they are."""
    folder = tmp_path_factory.mktemp("large")
    vocab = save_char_tokenizer(folder, max_length=MAX_LEN)
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 6, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": MAX_LEN}
    config = Qwen3Config(vocab_size=vocab, dtype="bfloat16", architectures=["Qwen3ForCausalLM"], **shape, **heads)
    config.save_pretrained(folder)
    async for sleeper in _launched(engine_config(folder, load_format="dummy", dtype="bfloat16"), folder, History({})):
        yield sleeper


@pytest.fixture(scope="module")
async def nano(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sleeper]:
    """Exact: fp32, and a model to hold it against."""
    folder = save_dense(tmp_path_factory.mktemp("nano"))
    async for sleeper in _launched(engine_config(folder, dtype="float32"), folder, History.of(folder)):
        yield sleeper


@pytest.fixture(scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sleeper]:
    """With an adapter, `ad`; in bf16, since vLLM's kernels for adapters take no fp32."""
    folder = save_dense(tmp_path_factory.mktemp("adapted"))
    config = engine_config(folder, dtype="bfloat16", enable_lora=True)
    async for sleeper in _launched(config, folder, History.of(folder)):
        body = {"lora_name": "ad", "lora_path": str(save_adapter(folder / "adapter"))}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{sleeper.process.url}/v1/load_lora_adapter", json=body, timeout=aiohttp.ClientTimeout(60)
            ) as answer,
        ):
            assert answer.status == 200, await answer.text()
        yield sleeper


async def answer_of(sleeper: Sleeper, model: str) -> tuple[list[int], list[float]]:
    """Token ids and logprobs of a short greedy answer."""
    body = {
        "model": model, "prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0, "logprobs": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    choice = (await sleeper.engine.completion(body))["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def test_fifty_rounds_free_the_device_and_grow_nowhere(large: Sleeper, capsys: pytest.CaptureFixture) -> None:
    first = await large.tokens()
    awake = used()
    assert awake - large.before > KV_BYTES + 2 * GIB
    asleep_after, awake_after, host = [], [], []
    for _ in range(50):
        await large.engine.sleep(1)
        asleep_after.append(used())
        await large.engine.wake_up()
        awake_after.append(used())
        host.append(host_bytes(large.process.pid))
        assert await large.tokens() == first
    left = asleep_after[0] - large.before
    with capsys.disabled():
        print(
            f"\nlevel 1: engine awake {(awake - large.before) / GIB:.2f} GiB, asleep {left / GIB:.2f} GiB; round 50 "
            f"asleep {(asleep_after[-1] - large.before) / GIB:.2f}, awake {(awake_after[-1] - large.before) / GIB:.2f};"
            f" host {host[4] / GIB:.2f} to {host[-1] / GIB:.2f} GiB"
        )
    assert left < 2 * GIB, "a CUDA context and little more"
    assert awake - asleep_after[0] > 0.98 * (KV_BYTES + 2 * GIB)
    assert max(asleep_after[5:]) - asleep_after[4] < 64 * MIB
    assert max(awake_after[5:]) - awake_after[4] < 64 * MIB
    assert max(host[5:]) < 1.05 * host[4] + 64 * MIB


async def test_memory_comes_back_by_tag(large: Sleeper) -> None:
    first = await large.tokens()
    for level in (1, 2):
        await large.engine.sleep(level)
        asleep = used()
        await large.engine.wake_up(["weights"])
        weights = used()
        assert 2 * GIB < weights - asleep < KV_BYTES
        await large.engine.wake_up(["kv_cache"])
        assert used() - weights > 0.98 * KV_BYTES
        if level == 1:
            assert await large.tokens() == first
    # Level 2 has dropped the weights: whoever asks waits for new ones (this engine gets none, and is ended).
    waiting = asyncio.create_task(large.tokens())
    done, _ = await asyncio.wait({waiting}, timeout=2.0)
    assert not done, "an engine without weights answered"
    waiting.cancel()


async def test_prefix_cache_and_requests_in_flight_outlive_a_sleep(nano: Sleeper) -> None:
    await nano.check_prefix()
    several = replace(LONG, temperature=1.0, seed=3)  # vLLM 0.26 refuses several greedy samples
    before = (await nano.engine.control.verbs.stats()).generation_tokens
    running = asyncio.create_task(nano.engine.sample([9, 8, 7], 4, several))
    await asked(nano.engine.control.verbs.stats, lambda now: now.generation_tokens >= before + 4)
    await nano.engine.sleep(1)
    assert not running.done(), "make it longer"
    await nano.engine.wake_up()
    for sample in await running:
        assert len(sample.token_ids) == 400
        assert nano.history.worst_difference([9, 8, 7], sample) < 1e-4
    await nano.check_prefix()


async def test_after_level_two_nothing_is_served_before_an_update(nano: Sleeper) -> None:
    model = nano.history.latest
    checksum = await nano.update(model)
    await nano.check_prefix()
    growth = []
    for round_ in range(10):
        await nano.engine.sleep(2)
        await nano.engine.wake_up(["weights"])
        model = changed(model, round_) if round_ else model
        if round_ % 2:  # both orders: new weights before the KV cache is back, and after
            await nano.engine.wake_up(["kv_cache"])
        waiting = asyncio.create_task(nano.engine.sample([5, 6, 7], 1, GREEDY))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done, "an engine without weights answered"
        told = await nano.update(model)
        if not round_ % 2:
            await nano.engine.wake_up(["kv_cache"])
        if not round_:
            assert told == checksum, "the same weights, padding included"
        sample = (await waiting)[0]
        assert set(sample.versions()) == {nano.engine.weight_version}
        assert nano.history.worst_difference([5, 6, 7], sample) < 1e-4
        await nano.check_prefix()
        growth.append(used())
    assert max(growth[3:]) - growth[2] < 64 * MIB


async def test_adapters_are_back_after_waking(adapted: Sleeper) -> None:
    """Level 2 drops what the device had of them too."""
    before, base = await answer_of(adapted, "ad"), await answer_of(adapted, str(adapted.folder))
    assert before != base, "the adapter changes nothing"
    await adapted.engine.sleep(1)
    await adapted.engine.wake_up()
    assert await answer_of(adapted, "ad") == before
    model = adapted.history.latest.to(torch.bfloat16)
    for _ in range(3):
        await adapted.engine.sleep(2)
        await adapted.engine.wake_up(["weights"])
        await adapted.update(model)
        await adapted.engine.wake_up(["kv_cache"])
        assert await answer_of(adapted, "ad") == before
        assert await answer_of(adapted, str(adapted.folder)) == base
    await adapted.update(changed(model, 7, scale=0.1))
    assert await answer_of(adapted, "ad") != before, "an adapter is added to the new weights"


async def test_trainer_and_engine_take_turns_on_one_gpu(nano: Sleeper) -> None:
    """The engine sleeps while the trainer has the memory; the new weights come by CUDA IPC."""
    ipc = pytest.importorskip("penstock.weights.cuda_ipc")
    store = ipc.CudaIpcStore()
    engine = nano.engine
    trained = changed(nano.history.latest, 90).to("cuda")
    try:
        for round_ in range(5):
            await engine.sleep(2)
            asleep = used()
            work = torch.empty(KV_BYTES, dtype=torch.uint8, device="cuda").fill_(round_)  # the training step's memory
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.01)
            assert used() - asleep > 0.9 * KV_BYTES
            del work
            torch.cuda.empty_cache()
            await engine.wake_up(["weights"])
            version = engine.weight_version + 1
            manifest = store.publish(version, trained.named_parameters())
            await engine.control.prepare_weights(manifest)
            await engine.control.apply_weights(version)
            store.commit(manifest)
            engine._version = version
            nano.history.models[version] = copy.deepcopy(trained).to("cpu")
            await engine.wake_up(["kv_cache"])
            sample = (await engine.sample([5, 6, 7], 1, GREEDY))[0]
            assert set(sample.versions()) == {version}
            assert nano.history.worst_difference([5, 6, 7], sample) < 1e-4
            await nano.check_prefix()
    finally:
        store.close()
