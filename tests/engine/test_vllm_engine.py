"""One real vLLM CPU engine: exact logprobs, exact versions, refusals before a change."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nano_models import changed
from patience import asked
from penstock.engine.control import ControlClient
from penstock.errors import EngineHTTPError, StateError, WeightsError
from penstock.types import GenerateBatch, SamplingParams
from penstock.weights.delta import DeltaStore
from penstock.weights.disk import DiskStore
from penstock.wire import UNKNOWN_VERSION

pytestmark = pytest.mark.vllm

LONG = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False, seed=7)


async def test_sizes_and_info(live):
    assert (live.engine.tp_size, live.engine.pp_size, live.engine.dp_size) == (1, 1, 1)
    info = await live.engine.control.info()
    assert info.engine == "vllm"
    assert info.vocab_size == 100
    assert info.max_model_len == 1024
    assert info.model
    assert len(info.instance) == 32
    assert info.capabilities.sampled_logprobs
    assert not info.capabilities.lora  # it was launched without
    assert not info.capabilities.sleep  # it would free nothing


@pytest.mark.parametrize(
    "masks",
    [
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 1.0, "top_p": 0.5, "top_k": 5},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids="+".join,
)
async def test_logprobs_are_of_the_distribution_sampled_from(live, masks):
    """What `GenerateOutput.response_logprobs` says of masks and penalties."""
    options = {"max_tokens": 20, "temperature": 0.7, "ignore_eos": True, "seed": 3, **masks}
    prompt, params = [10, 20, 30], SamplingParams(**options)
    (sample,) = await live.engine.sample(prompt, 1, params)
    ids = list(sample.token_ids)
    with torch.no_grad():
        logits = live.history.latest(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    rows = [_processed(row, prompt, ids[:i], params).log_softmax(-1) for i, row in enumerate(logits)]
    again = [float(row[token]) for row, token in zip(rows, ids, strict=True)]
    assert max(abs(a - b) for a, b in zip(again, sample.logprobs, strict=True)) < 1e-4
    whole = (logits / (params.temperature or 1.0)).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert max(abs(a - b) for a, b in zip(whole, sample.logprobs, strict=True)) > 1e-2


def _processed(logits, prompt, made, params):
    """`[V]` logits of one step as vLLM draws from them: penalties, temperature, min_p, top_k, top_p in turn."""
    counts = torch.bincount(torch.tensor(made, dtype=torch.long), minlength=len(logits))
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[[*prompt, *made]] = True
    r = params.repetition_penalty
    logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
    logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.temperature == 0:
        return logits
    logits = logits / params.temperature
    shares = logits.softmax(-1)
    logits = logits.masked_fill(shares < params.min_p * shares.max(), -torch.inf)
    if params.top_k:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    shares, order = logits.softmax(-1).sort(descending=True)
    beyond = order[shares.cumsum(-1) - shares >= params.top_p]
    return logits.index_fill(0, beyond, -torch.inf)


async def test_the_token_that_ends_a_text_is_no_part_of_it(live):
    samples = await live.engine.sample([5, 6], 16, SamplingParams(max_tokens=200, seed=1))
    (first, *_), texts = [s for s in samples if s.finish_reason == "stop"], live.engine.data.detokenize
    assert first.token_ids[-1] == 2
    assert first.text == await texts(first.token_ids[:-1]) != await texts(first.token_ids)
    shown = await live.engine.sample([5, 6], 16, SamplingParams(max_tokens=200, seed=1, skip_special_tokens=False))
    assert shown[samples.index(first)].text == await texts(first.token_ids)
    stop = SamplingParams(max_tokens=200, seed=1, stop_token_ids=first.token_ids[1:2])
    stopped = (await live.engine.sample([5, 6], 16, stop))[samples.index(first)]
    assert stopped.text == await texts(first.token_ids[: 1 + first.token_ids.index(first.token_ids[1])])


async def test_chat_and_string_prompts_go_through_the_engines_own_tokenizer(live):
    params = SamplingParams(max_tokens=8, temperature=0)
    chat = [{"role": "user", "content": "3 1 2"}]
    batch = GenerateBatch(prompts=[chat, "3 1 2"], sampling_params=params)
    out = await live.engine.generate(batch)
    same = await live.engine.generate(
        prompt_token_ids=[await live.engine.data.tokenize("3 1 2")], sampling_params=params
    )
    # This checkpoint's chat template is the bare text.
    assert out.response_ids[0] == out.response_ids[1] == same.response_ids[0]


async def test_a_label_that_somebody_gave_past_us_ends_nothing(live):
    control = live.engine.control
    if (await control.info()).vllm.startswith("0.26"):
        pytest.skip("it labels nothing")

    async def label(name: str) -> None:
        await control.http.post("/update_weight_version", {"new_version": name}, timeout_s=60)

    try:
        await label("step-100")
        (sample,) = await live.engine.sample([5, 6, 7], 1, LONG)
        assert set(sample.versions()) == {UNKNOWN_VERSION}
        with pytest.raises(EngineHTTPError, match="labelled 'step-100', and a version is a whole number"):
            await control.info()
    finally:
        await label(str(live.engine.weight_version))
    (sample,) = await live.engine.sample([5, 6, 7], 1, LONG)
    assert set(sample.versions()) == {live.engine.weight_version}


async def test_every_token_has_the_version_that_made_it(live):
    """Invariant 1, with two updates while 24 samples are in flight."""
    start = live.engine.weight_version
    prompts, short = [[5, 6, 7 + i] for i in range(12)], replace(LONG, max_tokens=30)

    async def others():
        """Short requests all the time, which the hold does not reach: steps are under way when an update comes."""
        while live.engine.weight_version < start + 2:
            for sample in await live.engine.sample([5, 6, 7], 4, short):
                assert live.history.worst_difference([5, 6, 7], sample) < 1e-4

    with live.hold.at(60):
        tasks = [asyncio.create_task(live.engine.sample(p, 2, LONG)) for p in prompts]
        traffic = asyncio.create_task(others())
        for seed, tokens in ((1, 120), (2, 180)):
            await live.hold.reached(24)
            report = await live.update(changed(live.history.latest, seed))
            assert report.engines[0].seconds["bubble"] == report.bubble > 0
            live.hold.move(tokens)
        await traffic
    answers = [sample for task in tasks for sample in await task]
    live.history.models[start - 1] = changed(live.history.models[start], 99)
    unseen = 0
    for i, sample in enumerate(answers):
        prompt = prompts[i // 2]
        assert len(sample.token_ids) == 200
        assert [span.version for span in sample.spans] == [start, start + 1, start + 2]
        assert live.history.worst_difference(prompt, sample) < 1e-4
        assert live.history.worst_difference(prompt, sample, shift=-1) > 1e-2
        unseen += live.history.unseen(prompt, sample)
    assert unseen <= 4 * len(answers) / 8, "of four ends each, moved by a token"
    del live.history.models[start - 1]


async def test_a_prefix_cached_under_other_weights_shows_in_logprobs_and_a_reset_ends_it(live):
    """By which `test_complaint_01_stale_kv.py` sees that an update leaves none."""
    prompt = [3 + i % 90 for i in range(160)]
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    await live.engine.sample(prompt, 1, one)  # fills the prefix cache
    store = live.engine._store
    model = changed(live.history.latest, 22)
    version = live.engine.weight_version + 1
    manifest = store.publish(version, model.named_parameters())
    await live.engine.control.prepare_weights(manifest)
    assert not (await live.engine.control.info()).kv_kept
    await live.engine.control.apply_weights(version, kv="keep")
    assert (await live.engine.control.info()).kv_kept, "for who takes the engine over"
    live.took(manifest, model)
    stale = (await live.engine.sample(prompt, 1, one))[0]
    assert live.history.worst_difference(prompt, stale) > 1e-3, "the cache was not stale"
    await live.engine.reset_prefix_cache()
    fresh = (await live.engine.sample(prompt, 1, one))[0]
    assert live.history.worst_difference(prompt, fresh) < 1e-4


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), "not in the engine's model: model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(65)}), r"shape \(65,\), the engine's has \(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.bfloat16)}), "cast before sending"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "NaN"),
        (lambda t: t.clear(), "no tensors given"),
    ],
)
async def test_unfit_weights_are_refused_before_anything_changes(live, edit, message):
    before = await live.engine.sample([5, 6, 7], 2, LONG)
    tensors = {name: p.detach().clone() for name, p in live.history.latest.named_parameters()}
    edit(tensors)
    with pytest.raises(WeightsError, match=message):
        await live.engine.update_weights(tensors.items())
    after = await live.engine.sample([5, 6, 7], 2, LONG)
    if "PENSTOCK_TEST_ENGINE" not in os.environ:
        assert after == before
    for one, other in zip(before, after, strict=True):  # on GPUs sums depend on the batch in the last bits
        assert one.token_ids[:16] == other.token_ids[:16]
        assert one.logprobs[:16] == pytest.approx(other.logprobs[:16], abs=1e-4)


async def test_bytes_that_changed_on_the_way_are_refused(live):
    store = live.engine._store
    manifest = store.publish(10_000, live.history.latest.named_parameters())
    with Path(manifest.location["path"]).open("r+b") as file:
        file.seek(manifest.tensors[3].offset)
        file.write(b"\x00\x00\x80\x3f")
    with pytest.raises(WeightsError, match=f"{manifest.tensors[3].name}.*checksum"):
        await live.engine.control.prepare_weights(manifest)


async def test_no_step_of_an_update_waits_for_the_api_server(live):
    """It stands still: behind the tokens of many streams it would only be slow."""
    engine, control = live.engine, ControlClient("live", live.process.url, api_key=live.key, timeout_s=60)
    model, version = changed(live.history.latest, 25), engine.weight_version + 1
    manifest = engine._store.publish(version, model.named_parameters())
    await control.info()
    await control.prepare_weights(manifest)  # the first one may wait for it, which says what tensors the model has
    os.kill(live.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WeightsError, match="missing"):
            await control.prepare_weights(replace(manifest, tensors=manifest.tensors[1:]))
        with pytest.raises(WeightsError, match="group"):
            await control.verbs.join_group({"epoch": "none"})
        await control.prepare_weights(manifest)
        await control.apply_weights(version)
    finally:
        os.kill(live.process.pid, signal.SIGCONT)
        await control.close()
    live.took(manifest, model)
    (sample,) = await engine.sample([5, 6, 7], 1, LONG)
    assert set(sample.versions()) == {version}
    assert live.history.worst_difference([5, 6, 7], sample) < 1e-4


@pytest.mark.parametrize(
    ("make", "way"), [(DiskStore, "the core"), (DeltaStore, "the core"), (DeltaStore, "the API server")]
)
async def test_by_either_way_files_and_deltas_are_checked_against_what_is_in_force(live, make, way, tmp_path):
    engine, control = live.engine, ControlClient("live", live.process.url, api_key=live.key, timeout_s=60)
    store = make(tmp_path)
    if way == "the core":  # else nobody has told where it listens
        assert {"disk", "delta"} <= set((await control.info()).transports)
    for seed in (51, 52):
        model, version = changed(live.history.latest, seed), engine.weight_version + 1
        manifest = store.publish(version, model.named_parameters())
        await control.prepare_weights(manifest)
        await control.apply_weights(version)
        store.commit(manifest)
        engine._version = version
        live.history.models[version] = model
        (sample,) = await engine.sample([5, 6, 7], 1, LONG)
        assert live.history.worst_difference([5, 6, 7], sample) < 1e-4
    assert (control._core is None) == (way == "the API server")
    assert make is DiskStore or manifest.location["delta"]
    with pytest.raises(WeightsError, match="missing"):
        await control.prepare_weights(replace(manifest, tensors=manifest.tensors[1:]))
    await control.close()


async def test_native_endpoints_drive_our_backend(live):
    """R18: vLLM's own start, update, finish."""
    engine = live.engine
    model = changed(live.history.latest, 41)
    manifest = engine._store.publish(engine.weight_version + 1, model.named_parameters())
    with pytest.raises(StateError, match="pause generation"):
        await engine.update_named_weights({"manifest": manifest.to_json()}, version=manifest.version)
    await engine.init_weight_update_communicator({})
    with live.hold.at(20):
        task = asyncio.create_task(engine.sample([5, 6, 7], 4, LONG))
        await live.hold.reached(4)
        await engine.pause_generation()
    await engine.update_named_weights({"manifest": manifest.to_json()}, version=manifest.version)
    live.took(manifest, model)
    await engine.resume_generation()
    assert (await engine.control.info()).weight_version == manifest.version == engine.weight_version
    for sample in await task:
        assert [span.version for span in sample.spans] == [manifest.version - 1, manifest.version]
        assert live.history.worst_difference([5, 6, 7], sample) < 1e-4


async def test_figures_are_the_engines_own(live):
    async def become(unfinished):
        await asked(live.engine.get_num_unfinished_requests, lambda now: now == unfinished)

    await become(0)
    with live.hold.at(20):
        task = asyncio.create_task(live.engine.sample([5, 6, 7], 4, LONG))
        await live.hold.reached(4)
        await become(4)
        assert 0 < await live.engine.get_cache_usage(0) < 1
        await live.engine.abort_generation()
        await task


async def test_collective_rpc_and_the_checksum_of_weights_in_force(live):
    first = await live.engine.collective_rpc("penstock_checksum")
    assert await live.engine.collective_rpc("penstock_checksum") == first
    report = await live.update(changed(live.history.latest, 51))
    assert [report.engines[0].checksum] == await live.engine.collective_rpc("penstock_checksum") != first


async def test_what_cannot_be_sent_fails_its_call_alone(live):
    with pytest.raises(EngineHTTPError, match="'get_model' returns cannot be sent to another process"):
        await live.engine.collective_rpc("get_model", timeout_s=60.0)
    assert await live.engine.collective_rpc("penstock_checksum", timeout_s=60.0)
    (sample,) = await live.engine.sample([5, 6, 7], 1, SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(sample.token_ids) == 5


async def test_a_call_after_one_that_has_failed_finds_its_connection_open(live):
    for _ in range(20):
        with pytest.raises(EngineHTTPError, match="no_such"):
            await live.engine.collective_rpc("no_such", timeout_s=60.0)
        assert await live.engine.collective_rpc("penstock_checksum", timeout_s=60.0)
