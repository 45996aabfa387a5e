"""The whole service over a real vLLM CPU engine: what it samples is what the learner has trained."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from sdk_rig import ANSWER, PROMPT, call, client_of

import tinker
from penstock.tinker.service import Service
from tinker import types

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "tinker.md"
GAP = 2e-3
"""Nats between the learner's logprob of a token and the engine's, both in fp32."""


def train(client: tinker.TrainingClient, steps: int) -> None:
    encode = client.get_tokenizer().encode
    ids = encode(PROMPT + ANSWER)
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
    for _ in range(steps):
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=2e-3)).result()


def gap_of(client: tinker.TrainingClient, prompt: list[int], found: types.SampleResponse) -> float:
    """The largest difference of logprobs over all samples."""
    data = []
    for sequence in found.sequences:
        ids = prompt + list(sequence.tokens)
        tokens = types.ModelInput.from_ints(ids[:-1])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": ids[1:]}))
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    gaps = [
        np.abs(output["logprobs"].to_numpy()[len(prompt) - 1 :] - np.array(sequence.logprobs)).max()
        for output, sequence in zip(outputs, found.sequences, strict=True)
    ]
    return float(max(gaps))


@pytest.mark.parametrize("unembed", [False, True])
async def test_samples_are_those_of_the_weights_that_were_trained(service: Service, unembed: bool):  # noqa: FBT001
    def work() -> None:
        client = (
            client_of(service.url).create_lora_training_client("sorter", rank=8, seed=1, train_unembed=unembed).result()
        )
        prompt = client.get_tokenizer().encode(PROMPT)
        params = types.SamplingParams(max_tokens=24, stop=[], seed=3)
        for steps in (3, 2):
            train(client, steps)
            sampler = client.save_weights_and_get_sampling_client().result()
            found = sampler.sample(types.ModelInput.from_ints(prompt), 3, params).result()
            assert gap_of(client, prompt, found) < GAP
        base = client_of(service.url).create_sampling_client(base_model="sorter").result()
        assert gap_of(client, prompt, base.sample(types.ModelInput.from_ints(prompt), 3, params).result()) > 10 * GAP

    await call(work)


async def test_the_first_program_of_the_documentation_teaches_its_sum(service: Service):
    (program,) = (block for block in DOCUMENT.read_text().split("```") if block.startswith("\nimport tinker\n"))
    env = os.environ | {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-anything", "HF_HUB_OFFLINE": "1"}
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=env, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(running.communicate(), 300.0)
    assert running.returncode == 0
    *losses, last = out.decode().splitlines()
    assert float(losses[-1].split()[1]) < 0.1 * float(losses[0].split()[1])
    assert last == "75 75 75"


@pytest.mark.slow
async def test_an_inflight_sampler_takes_each_version_up_in_place(service: Service):
    def work() -> None:
        client = client_of(service.url).create_lora_training_client("sorter", rank=8, seed=2).result()
        prompt = client.get_tokenizer().encode(PROMPT)
        params = types.SamplingParams(max_tokens=16, stop=[])
        train(client, 2)
        sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()
        for _ in range(3):
            found = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result()
            assert gap_of(client, prompt, found) < GAP
            train(client, 2)
            client.save_weights_and_get_sampling_client(kind="inflight").result()

    await call(work)
    assert len(await service.fleet.adapters()) < 16
