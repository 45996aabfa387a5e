"""Adapters on a real vLLM CPU engine: versions in place, spans, KV, pauses of one, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hold import Hold
from http_engine import HTTPEngine, launched_engine
from nano_models import ADAPTER_CONFIG, History, adapter_tensors, changed, logprobs_of, merged
from patience import asked
from penstock.control_types import KV, UpdateReport
from penstock.errors import EngineHTTPError, WeightsError
from penstock.settings import EngineConfig
from penstock.types import Sample, SamplingParams
from penstock.weights.adapter_files import SETTINGS, TENSORS, AdapterFiles
from penstock.wire import ADAPTERS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(550)]

LONG = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False, seed=7)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, temperature=0.0)
PROMPT = [5 + i % 60 for i in range(100)]


class Tuned:
    """The engine, and the model of each adapter's version."""

    def __init__(self, engine: HTTPEngine, base: Any, hold: Hold) -> None:
        self.engine = engine
        self.hold = hold
        self.models: dict[tuple[str | None, int | None], Any] = {(None, None): base}
        self.base = base

    async def update(self, name: str, seed: int) -> int:
        return (await self.report(name, seed)).version

    async def report(self, name: str, seed: int, kv: KV = "recompute") -> UpdateReport:
        tensors = adapter_tensors(seed)
        report = await self.engine.update_adapter(name, tensors.items(), config=ADAPTER_CONFIG, kv=kv)
        self.models[name, report.version] = merged(self.base, tensors)
        return report

    def replay_difference(self, name: str, prompt: Sequence[int], sample: Sample) -> float:
        """See `History.worst_difference`, with the adapter's versions."""
        history = History({version: model for (of, version), model in self.models.items() if of == name and version})
        spans = tuple(replace(span, version=span.adapter_version or 0) for span in sample.spans)
        return history.worst_difference(prompt, replace(sample, spans=spans))

    def check(self, prompt: Sequence[int], sample: Sample) -> None:
        """Every token's logprob is that of the adapter's version which its span names, and of no other."""
        assert sample.logprobs is not None
        edges = [0, *(span.end for span in sample.spans)]
        assert edges[-1] == len(sample.token_ids) == len(sample.logprobs)
        assert [span.start for span in sample.spans] == edges[:-1]
        for key, model in self.models.items():
            again = logprobs_of(model, list(prompt), list(sample.token_ids))
            for span in sample.spans:
                worst = max(abs(again[i] - sample.logprobs[i]) for i in range(span.start, span.end))
                if key == (span.adapter, span.adapter_version):
                    assert worst < 1e-4, (span, worst)
                elif span.end - span.start > 3:
                    assert worst > 1e-2, (span, key)


@pytest.fixture(scope="module")
async def tuned(nano_path: Path, hold: Hold, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tuned]:
    config = EngineConfig(
        model=str(nano_path), profile="cpu", max_model_len=512, enable_lora=True, max_loras=2,
        # So few blocks that they are soon used again.
        extra_args={"block-size": 32, "num-gpu-blocks-override": 96, **hold.extra_args},
    )  # fmt: skip
    logs = tmp_path_factory.mktemp("log")
    async with launched_engine(config, "tuned", logs, stream_chunk_tokens=8) as (engine, _):
        yield Tuned(engine, History.of(nano_path).latest, hold)


async def test_a_sample_spans_a_swap_with_exact_spans_and_no_new_request_finds_older_kv(tuned: Tuned) -> None:
    engine = tuned.engine
    assert await tuned.update("x", 1) == 1
    first = (await engine.sample(PROMPT, 1, SHORT, adapter="x"))[0]
    assert [(s.adapter, s.adapter_version) for s in first.spans] == [("x", 1)]
    tuned.check(PROMPT, first)
    with tuned.hold.at(20):
        task = asyncio.create_task(engine.sample([9, 8, 7], 2, LONG, adapter="x"))
        other = asyncio.create_task(engine.sample([9, 8, 7], 1, LONG))
        await tuned.hold.reached(3)
        assert await tuned.update("x", 2) == 2
    for sample in await task:
        assert [(s.adapter, s.adapter_version) for s in sample.spans] == [("x", 1), ("x", 2)]
        tuned.check([9, 8, 7], sample)
    (plain,) = await other
    assert [(s.adapter, s.adapter_version) for s in plain.spans] == [(None, None)]
    tuned.check([9, 8, 7], plain)
    again = (await engine.sample(PROMPT, 1, SHORT, adapter="x"))[0]
    assert [(s.adapter, s.adapter_version) for s in again.spans] == [("x", 2)]
    tuned.check(PROMPT, again)
    hits = await engine.prefix_hits()
    (third,) = await engine.sample(PROMPT, 1, SHORT, adapter="x")
    assert await engine.prefix_hits() > hits, "requests of one version share their KV"
    assert third.token_ids == again.token_ids
    tuned.check(PROMPT, third)


async def test_kept_kv_of_an_adapter_is_labelled_and_a_replay_gives_its_logprobs(tuned: Tuned) -> None:
    engine, prompt = tuned.engine, [9, 8, 7, *PROMPT]
    await tuned.update("k", 131)
    with tuned.hold.at(20):
        task = asyncio.create_task(engine.sample(prompt, 2, LONG, adapter="k"))
        other = asyncio.create_task(engine.sample(prompt, 1, LONG))
        await tuned.hold.reached(3)
        report = await tuned.report("k", 132, "keep_in_flight")
        assert [(update.preempted, update.kept) for update in report.engines] == [(0, 2)]
        before = await engine.prefix_hits()
        (fresh,) = await engine.sample(prompt, 1, SHORT, adapter="k")
        assert await engine.prefix_hits() == before
    assert [(s.adapter_version, s.kv_kept) for s in fresh.spans] == [(2, False)]
    tuned.check(prompt, fresh)
    for sample in await task:
        assert [(s.adapter_version, s.kv_kept) for s in sample.spans] == [(1, False), (2, True)]
        assert tuned.replay_difference("k", prompt, sample) < 1e-4
        by_weights_alone = replace(sample, spans=tuple(replace(s, kv_kept=False) for s in sample.spans))
        assert tuned.replay_difference("k", prompt, by_weights_alone) > 1e-3, "the label says nothing"
    (plain,) = await other
    assert [(s.adapter, s.kv_kept) for s in plain.spans] == [(None, False)]
    tuned.check(prompt, plain)
    (loss,) = (engine.loss for engine in (await tuned.engine.recovered(report)).engines)
    assert loss is not None
    assert 0 <= loss.tokens <= loss.rate * loss.seconds + 1e-6


async def held(tuned: Tuned, name: str, count: int | None = None) -> int:
    """Pause an adapter; how many of its requests the engine then holds. It returns once they are `count`, if given."""

    async def found() -> int:
        return (await tuned.engine.control.http.post(f"{ADAPTERS}/pause", {"name": name}, timeout_s=60.0))["held"]

    return await asked(found, lambda now: count in {None, now})


async def paused_in_flight(tuned: Tuned, name: str) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """Two samples and a chat's stream, all of which have tokens and are held; the stream's task gives its chunks."""
    body = {"model": name, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 100, "ignore_eos": True}

    async def read() -> list[Any]:
        return [chunk async for chunk in tuned.engine.chat_completion_stream(body)]

    with tuned.hold.at(20):
        task = asyncio.create_task(tuned.engine.sample([3, 4], 2, LONG, adapter=name))
        chat = asyncio.create_task(read())
        await tuned.hold.reached(3)
        assert await held(tuned, name) == 3
    return task, chat


async def test_a_pause_of_one_adapter_holds_its_requests_alone(tuned: Tuned) -> None:
    engine = tuned.engine
    before = {name: await tuned.update(name, seed) for name, seed in (("p", 11), ("q", 12))}
    task, chat = await paused_in_flight(tuned, "p")
    fresh = asyncio.create_task(
        engine.completion({"model": "p", "prompt": [3, 4], "max_tokens": 20, "ignore_eos": True})
    )
    await held(tuned, "p", 4)
    others = await asyncio.gather(engine.sample([3, 4], 2, LONG, adapter="q"), engine.sample([3, 4], 1, LONG))
    for samples, key in zip(others, [("q", before["q"]), (None, None)], strict=True):
        for sample in samples:
            assert [(s.adapter, s.adapter_version) for s in sample.spans] == [key]
            tuned.check([3, 4], sample)
    assert not any(waits.done() for waits in (task, chat, fresh)), "they wait"
    gone = asyncio.create_task(engine.sample([6, 6], 1, LONG, adapter="p"))
    await held(tuned, "p", 5)
    gone.cancel()
    await asyncio.wait((gone,))
    await held(tuned, "p", 4)
    after = await tuned.update("p", 13)
    assert not fresh.done()
    await engine.resume_generation(adapter="p")
    for sample in await task:
        assert [(s.adapter, s.adapter_version) for s in sample.spans] == [("p", before["p"]), ("p", after)]
        assert len(sample.token_ids) == 100
        tuned.check([3, 4], sample)
    (choice,) = (await fresh)["choices"]
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": 20, "adapter": "p", "adapter_version": after}
    ]
    (end,) = [c for chunk in await chat for c in chunk["choices"] if c.get("weight_versions")]
    assert [v["adapter_version"] for v in end["weight_versions"]] == [before["p"], after]
    assert end["weight_versions"][-1]["end"] == 100
    assert (await engine.control.verbs.stats()).waiting == 0


async def test_what_does_not_fit_is_refused_and_the_version_in_force_stays(tuned: Tuned) -> None:
    engine = tuned.engine
    version = await tuned.update("r", 21)
    good = adapter_tensors(22)
    wide = {name: torch.cat([t, t], 1) if "lora_A" in name else t for name, t in good.items()}
    deep = {name.replace("layers.0.", "layers.77."): t for name, t in good.items()} | good
    huge = {name: torch.cat([t] * 8, 0 if "lora_A" in name else 1) for name, t in good.items()}
    for tensors, config, why in (
        (wide, ADAPTER_CONFIG, "of another model: its tensor"),
        (deep, ADAPTER_CONFIG, r"has no 'model.layers.77'"),
        (huge, {**ADAPTER_CONFIG, "r": 64}, "greater than max_lora_rank"),
        (good, {**ADAPTER_CONFIG, "target_modules": ["q_proj"], "bias": "all"}, "bias"),
    ):
        with pytest.raises(WeightsError, match=why):
            await engine.update_adapter("r", tensors.items(), config=config)
    (sample,) = await engine.sample([1, 2], 1, SHORT, adapter="r")
    assert [(s.adapter, s.adapter_version) for s in sample.spans] == [("r", version)]
    tuned.check([1, 2], sample)


async def test_adapters_are_read_side_by_side_while_the_engine_generates(tuned: Tuned, tmp_path: Path) -> None:
    """The pipes in place of the settings end only when the test writes: both reads are under way at once."""
    calls, names = tuned.engine.control.verbs.adapters, ("s", "t")
    files = {name: AdapterFiles({"path": str(tmp_path / name)}) for name in names}
    for seed, name in enumerate(names, 51):
        (tmp_path / name).mkdir()
        save_file(adapter_tensors(seed), tmp_path / name / TENSORS)
        os.mkfifo(tmp_path / name / SETTINGS)
        tuned.models[name, 1] = merged(tuned.base, adapter_tensors(seed))
    reads = [asyncio.create_task(calls.read(name, files[name].source, timeout_s=300.0)) for name in names]
    async with asyncio.timeout(300.0):
        # A pipe opens when its reader has it open.
        ends = [await asyncio.to_thread((tmp_path / name / SETTINGS).open, "w") for name in names]
        (sample,) = await tuned.engine.sample([1, 2], 1, SHORT)
        tuned.check([1, 2], sample)
        assert not any(task.done() for task in reads)
        for end in ends:
            end.write(json.dumps(ADAPTER_CONFIG))
            end.close()
        await asyncio.gather(*reads)
        for name in names:  # a second read would wait at the pipe
            await calls.load(name, 1, files[name].source, timeout_s=300.0)
            (sample,) = await tuned.engine.sample([1, 2], 1, SHORT, adapter=name)
            assert [(s.adapter, s.adapter_version) for s in sample.spans] == [(name, 1)]
            tuned.check([1, 2], sample)
            await calls.unload(name)


async def test_an_adapter_that_vllm_has_dropped_comes_back_as_it_was(tuned: Tuned) -> None:
    for i in range(4):
        await tuned.update(f"many{i}", 30 + i)
    for i in (0, 3, 1, 2, 0):
        (sample,) = await tuned.engine.sample([1, 2, i], 1, SHORT, adapter=f"many{i}")
        tuned.check([1, 2, i], sample)


async def test_an_update_of_the_base_leaves_adapters_and_one_in_use_is_not_unloaded(tuned: Tuned) -> None:
    engine = tuned.engine
    version = await tuned.update("u", 41)
    other = changed(tuned.base, 4)
    with tuned.hold.at(20):
        task = asyncio.create_task(engine.sample([2, 3], 1, LONG, adapter="u"))
        await tuned.hold.reached(1)
        with pytest.raises(EngineHTTPError, match="'u' has requests in flight"):
            await engine.unload_adapter("u")
        await engine.update_weights(other.named_parameters())
    (sample,) = await task
    assert [(s.version, s.adapter, s.adapter_version) for s in sample.spans] == [(0, "u", version), (1, "u", version)]
    assert sample.logprobs is not None
    again = logprobs_of(merged(other, adapter_tensors(41)), [2, 3], list(sample.token_ids))
    assert max(abs(again[i] - sample.logprobs[i]) for i in range(sample.spans[1].start, 100)) < 1e-4
    await engine.unload_adapter("u")
    with pytest.raises(EngineHTTPError, match="does not exist"):
        await engine.sample([2, 3], 1, SHORT, adapter="u")
    await engine.update_weights(tuned.base.named_parameters())  # for the tests that follow


async def test_an_adapter_that_overflows_leaves_nothing_for_others(tuned: Tuned) -> None:
    prompts = [[5 + (i * 7 + k) % 60 for i in range(20 + k)] for k in range(12)]
    before = [(await tuned.engine.sample(prompt, 1, SHORT))[0] for prompt in prompts]
    huge = {name: tensor * 1e30 for name, tensor in adapter_tensors(1).items()}
    await tuned.engine.update_adapter("huge", huge.items(), config=ADAPTER_CONFIG)
    long = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
    overflowed = await asyncio.gather(
        *(tuned.engine.sample([9 + k] * 30, 2, long, adapter="huge") for k in range(24)), return_exceptions=True
    )
    assert not [answer for answer in overflowed if isinstance(answer, BaseException)]
    after = [(await tuned.engine.sample([*prompt], 1, SHORT))[0] for prompt in prompts]
    for prompt, was, found in zip(prompts, before, after, strict=True):
        assert found.token_ids == was.token_ids
        tuned.check(prompt, found)
