"""The whole service, as the real SDK sees it: owner, learner and API processes over a simulated engine."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from sdk_rig import ANSWER, BASE, PROMPT, call, client_of, service_of

import tinker
from penstock import Fleet
from penstock.config import EngineConfig, FleetConfig, RouterConfig, TrainConfig
from penstock.engine.command import server_command
from penstock.errors import ConfigError, UserError
from penstock.tinker.children import SupervisedChild
from penstock.tinker.service import Service, ServiceConfig, adapted, serving
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-3)


def example(client: tinker.TrainingClient, prompt: str = PROMPT, answer: str = ANSWER) -> types.Datum:
    encode = client.get_tokenizer().encode
    asked, ids = len(encode(prompt)), encode(prompt + answer)
    weights = [0.0] * (asked - 1) + [1.0] * (len(ids) - asked)
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def trained(client: tinker.TrainingClient, steps: int, answer: str = ANSWER) -> list[float]:
    """The loss before each step; two futures of a step are under way at once, as recipes have them."""
    losses = []
    for _ in range(steps):
        evaluated = client.forward_backward([example(client, answer=answer)], "cross_entropy")
        stepped = client.optim_step(ADAM)
        losses.append(evaluated.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    return losses


def loss_of(client: tinker.TrainingClient, answer: str = ANSWER) -> float:
    return client.forward([example(client, answer=answer)], "cross_entropy").result().metrics["loss:sum"]


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with service_of(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, "32"), ({"max_loras": 2}, "8"), ({"extra_args": {"max_cpu_loras": 100}}, "100")],
    ids=["default", "two in a batch", "said"],
)
def test_engines_keep_more_adapters_than_a_batch_has(tmp_path: Path, given: dict[str, Any], kept: str):
    engine = EngineConfig(model="Qwen/Qwen3-0.6B", profile="cpu", **given)
    config = ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path)
    argv = server_command(adapted(config), api_key=None).argv
    assert argv[argv.index("--max-cpu-loras") + 1] == kept
    assert argv.count("--max-cpu-loras") == 1


async def test_a_folder_that_others_can_read_and_bad_keys_are_refused_before_anything_starts(tmp_path: Path):
    engine = EngineConfig(model="Qwen/Qwen3-0.6B", profile="cpu")
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text("alice: {key: tml-alice-1}")
    config = ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path / "data", keys=keys)
    with pytest.raises(ConfigError, match="tenant alice needs a key that begins with tml- and has at least 12"):
        async with serving(config):
            pass
    wide = ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path / "data", host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"without --keys any key opens the service, so --host 0.0.0.0 is refused"):
        async with serving(wide):
            pass
    assert not (tmp_path / "data").exists()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is open to other users \(mode 755\): chmod 700 it"):
        async with serving(ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path)):
            pass
    tmp_path.chmod(0o700)
    with (tmp_path / "owner.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another service uses --data .*; stop it, or choose another folder"):
            async with serving(ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path)):
                pass


async def test_a_process_whose_watch_broke_leaves_no_other_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stopped: list[str] = []

    @asynccontextmanager
    async def launch(*_: Any, **__: Any) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(url="http://fleet")

    async def start(child: SupervisedChild) -> None:
        child.url = "http://child:1"

    async def stop(child: SupervisedChild) -> None:
        stopped.append(child.name)
        raise RuntimeError(child.name)

    monkeypatch.setattr(Fleet, "launch", launch)
    monkeypatch.setattr(SupervisedChild, "start", start)
    monkeypatch.setattr(SupervisedChild, "stop", stop)
    with pytest.raises(RuntimeError):
        async with service_of(tmp_path / "data"):
            pass
    assert stopped == ["API process", "learner"]


async def test_models_of_two_clients_learn_different_things(service: Service):
    def work() -> None:
        clients = [
            client_of(service.url).create_lora_training_client(BASE, rank=rank, seed=1).result() for rank in (4, 8)
        ]
        before = [loss_of(client, answer) for client, answer in zip(clients, ("1 2 3", "9 8 7"), strict=True)]
        for client, answer in zip(clients, ("1 2 3", "9 8 7"), strict=True):
            losses = trained(client, 4, answer)
            assert losses == sorted(losses, reverse=True)
        after = [loss_of(client, answer) for client, answer in zip(clients, ("1 2 3", "9 8 7"), strict=True)]
        assert all(now < then / 2 for now, then in zip(after, before, strict=True))
        assert loss_of(clients[0], "9 8 7") > after[1]

    await call(work)


async def test_saved_weights_sample_and_go_on(service: Service):
    def work() -> None:
        at = client_of(service.url)
        client = at.create_lora_training_client(BASE, rank=4, seed=2).result()
        trained(client, 2)
        loss = loss_of(client)
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(client.get_tokenizer().encode(PROMPT))
        params = types.SamplingParams(max_tokens=6, stop=[])
        found = sampler.sample(prompt, 3, params).result()
        assert [len(sequence.tokens) for sequence in found.sequences] == [6, 6, 6]
        assert all(len(sequence.logprobs or ()) == 6 for sequence in found.sequences)
        path = client.save_state("one").result().path
        trained(client, 1)
        again = at.create_training_client_from_state_with_optimizer(path).result()
        assert again.get_info().lora_rank == 4
        assert loss_of(again) == pytest.approx(loss, rel=1e-4)
        one, two = trained(client, 1), trained(again, 2)
        assert two[1] == pytest.approx(one[0], rel=1e-3), "the optimiser's state is part of a checkpoint"
        named = client.save_weights_for_sampler("two").result().path
        base = at.create_sampling_client(base_model=BASE).result().sample(prompt, 1, params).result()
        later = at.create_sampling_client(model_path=named).result().sample(prompt, 1, params).result()
        assert base.sequences[0].tokens != later.sequences[0].tokens

    await call(work)


async def test_an_api_process_that_dies_is_back_with_its_futures(service: Service):
    def begun() -> Any:
        client = client_of(service.url).create_lora_training_client(BASE, rank=4, seed=4).result()
        trained(client, 1)
        return client, [client.forward_backward([example(client)] * 64, "cross_entropy") for _ in range(4)]

    client, futures = await call(begun)
    os.kill(service.api.pid, signal.SIGKILL)
    losses = await call(lambda: [future.result().metrics["loss:sum"] for future in futures])
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)
    assert (await call(lambda: client.optim_step(ADAM).result())).metrics["grad_norm:mean"] > 0


async def test_a_learner_that_dies_comes_back_from_the_last_save(service: Service):
    def begun() -> Any:
        client = client_of(service.url).create_lora_training_client(BASE, rank=4, seed=5).result()
        trained(client, 2)
        client.save_state("kept").result()
        loss = loss_of(client)
        trained(client, 2)
        return client, loss

    client, loss = await call(begun)
    os.kill(service.learner.pid, signal.SIGKILL)

    def after() -> None:
        with pytest.raises(tinker.RequestFailedError, match=r"learner .*(lost|last save)"):
            loss_of(client)
        assert loss_of(client) == pytest.approx(loss, rel=1e-4), "from there on it works again, from what was saved"
        trained(client, 1)

    await call(after)


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed_and_what_was_lost_fails(service: Service):
    def begun() -> Any:
        client = client_of(service.url).create_lora_training_client(BASE, rank=4, seed=6).result()
        client.save_state("kept").result()
        trained(client, 1)
        return client

    client = await call(begun)
    for child in (service.learner, service.api):
        child.patience_s = 6.0  # from the next wait on
    stopped = [service.learner.pid, service.api.pid]
    try:
        os.kill(stopped[0], signal.SIGSTOP)
        stepped = await call(lambda: client.optim_step(ADAM))
        with pytest.raises(tinker.RequestFailedError, match=r"learner .*(lost|last save)"):
            await call(stepped.result)
        await call(lambda: trained(client, 1))
        os.kill(stopped[1], signal.SIGSTOP)
        await call(lambda: trained(client, 1))
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert stopped[0] != service.learner.pid
    assert stopped[1] != service.api.pid
    for child in (service.learner, service.api):
        child.patience_s = 60.0


async def test_a_model_without_a_configuration_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(*_: object) -> None:
        raise LocalEntryNotFoundError("it has no such file")

    monkeypatch.setattr("penstock.tinker.service.check_on_hub", lambda *_: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_entry)
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for model, why in (
        ("some/weights", "some/weights/config.json cannot be read: it has no such file"),
        (str(tmp_path), "config.json cannot be read: No such file"),
        (str(tmp_path / "folder"), "config.json cannot be read: Is a directory"),
    ):
        engine = EngineConfig(model=model, profile="cpu")
        with pytest.raises(ConfigError, match=why):
            async with serving(ServiceConfig(engine, FleetConfig(), RouterConfig(), TrainConfig(), tmp_path / "data")):
                pass
