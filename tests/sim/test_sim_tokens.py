"""The simulated model's tokens are a function of their place, and the checker sees every way to get that wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.sim import Model, SimConfig, SimEngine
from penstock.sim.tokens import Prefix, Weights, decode, encode, expected_logprob, expected_token
from penstock.types import Sample, SamplingParams, VersionSpan
from sim_verify import generate, verify
from virtual_time import run_virtual

PROMPT = [5, 6, 7, 8]


def sample_of(params: SamplingParams, config: SimConfig | None = None) -> list[Sample]:
    return run_virtual(lambda _: generate(SimEngine(config), PROMPT, params))


def test_sample_i_has_the_seed_plus_i_as_in_vllm():
    both = sample_of(SamplingParams(max_tokens=20, n=2, seed=7))
    assert both[1].token_ids == sample_of(SamplingParams(max_tokens=20, seed=8))[0].token_ids


@pytest.mark.parametrize("change", [{"version": 1, "kv_version": 1}, {"kv_version": 1}, {"adapter": "a"}])
def test_other_weights_make_other_tokens(change):
    old = Weights(0, 0)
    new = replace(old, **change)
    prefixes = [Prefix.of(range(i)) for i in range(200)]
    same = sum(expected_token(Model(), p, old, seed=0) == expected_token(Model(), p, new, seed=0) for p in prefixes)
    assert same < 5
    logprobs = [expected_logprob(p, 3, w, temperature=1.0) for p in prefixes for w in (old, new)]
    assert len(set(logprobs)) == len(logprobs)
    assert all(-8 <= logprob < 0 for logprob in logprobs)


def test_every_way_to_spoil_a_sample_is_seen():
    params = SamplingParams(max_tokens=40, n=2, seed=5)
    good = sample_of(params)[1]
    assert verify(PROMPT, good, params=params) == []
    ids, logprobs = good.token_ids, good.logprobs
    assert logprobs is not None
    spoiled = {
        "lost": replace(good, token_ids=ids[:9] + ids[10:] + (1,), logprobs=logprobs[:9] + logprobs[10:] + (-1.0,)),
        "doubled": replace(good, token_ids=ids[:9] + ids[8:-1], logprobs=logprobs[:9] + logprobs[8:-1]),
        "shifted": replace(good, token_ids=(1, *ids[:-1]), logprobs=(-1.0, *logprobs[:-1])),
        "changed": replace(good, token_ids=(*ids[:9], ids[9] ^ 1, *ids[10:])),
        "logprob": replace(good, logprobs=(*logprobs[:9], logprobs[9] + 1e-3, *logprobs[10:])),
        "logprobs shifted": replace(good, logprobs=(*logprobs[1:], logprobs[0])),
        "mislabelled": replace(good, spans=(VersionSpan(0, 0, 39), VersionSpan(1, 39, 40))),
        "gap": replace(good, spans=(VersionSpan(0, 0, 20), VersionSpan(0, 21, 40))),
        "short": Sample(ids[:-1], "length", logprobs[:-1], (VersionSpan(0, 0, 39),)),
        "logprob missing": replace(good, logprobs=logprobs[:-1]),
        "stopped by nothing": replace(good, finish_reason="stop"),
    }
    unseen = [name for name, sample in spoiled.items() if not verify(PROMPT, sample, params=params)]
    assert unseen == []
    assert verify([*PROMPT, 1], good, params=params)
    assert verify(PROMPT, good, params=params, seeds=[5]), "sample 1 is not sample 0"
    assert verify(PROMPT, good, params=params, adapter="x")


def test_eos_ends_a_share_of_samples_and_ignore_eos_and_min_tokens_hold():
    config = SimConfig(eos_share=0.1)
    params = SamplingParams(max_tokens=60, n=100)
    samples = sample_of(params, config)
    lengths = [len(s.token_ids) for s in samples]
    assert 5 < sum(lengths) / len(lengths) < 15
    for sample in samples:
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == config.eos_token_id)
        assert verify(PROMPT, sample, model=config.model, params=params) == []
    ignoring = replace(params, ignore_eos=True)
    assert {len(s.token_ids) for s in sample_of(ignoring, config)} == {60}
    late = replace(params, min_tokens=30)
    samples = sample_of(late, config)
    assert min(len(s.token_ids) for s in samples) >= 30
    assert all(verify(PROMPT, s, model=config.model, params=late) == [] for s in samples)


def test_stop_tokens_and_stop_strings():
    plain = sample_of(SamplingParams(max_tokens=20))[0]
    params = SamplingParams(max_tokens=20, stop_token_ids=(plain.token_ids[6],))
    stopped = sample_of(params)[0]
    assert (stopped.token_ids, stopped.finish_reason) == (plain.token_ids[:7], "stop")
    assert stopped.text == plain.text[:6]
    assert verify(PROMPT, stopped, params=params) == []
    stopped = sample_of(SamplingParams(max_tokens=20, stop=(plain.text[6:8],)))[0]
    assert (stopped.token_ids, stopped.text) == (plain.token_ids[:8], plain.text[:6])


@pytest.mark.parametrize("size", [1024, 150_000])
def test_text_round_trip(size):
    ids = [1, 42, 95, 96, size // 2, size - 1]
    assert encode(decode(ids, eos_token_id=0), size) == ids
    assert all(0 < i < 32 for i in encode("a\nb\u4e00 é", 32))
