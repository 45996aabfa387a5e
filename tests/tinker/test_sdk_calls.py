"""Every method of the SDK, through the whole service on a real vLLM CPU engine, and what its page says of each."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdk_rig import BASE, MODEL, call, client_of
from tinker.lib.api_future_impl import QueueState

import tinker
from penstock.tinker.service import Service
from tinker import types

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PAGE = re.sub(r"\s+", " ", (Path(__file__).parents[2] / "docs" / "tinker.md").read_text())
CLIENTS = (
    tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient,
)  # fmt: skip
KEY = "tml-of-a-test"
TOKENS = [5, 6, 7, 8]
PROMPT = types.ModelInput.from_ints(TOKENS)
ADAM = types.AdamParams(learning_rate=1e-3)


@dataclass(frozen=True)
class World:
    """Clients of one session, with a checkpoint of each kind, and a folder that has the tokenizer under its name."""

    service: Any
    training: Any
    sampling: Any
    rest: Any
    admin: Any
    path: str
    sampler_path: str
    folder: Path
    url: str

    @property
    def run(self) -> str:
        return self.path.split("/")[2]

    @property
    def session(self) -> str:
        return self.run.partition(":")[0]

    def driven(self, *, later: bool = False) -> World:
        """The same, with clients whose methods give their results."""
        clients = {f.name: Driven(getattr(self, f.name), later) for f in fields(self)[:5]}
        return replace(self, **clients)


@dataclass(frozen=True)
class Driven:
    """A client whose methods give their results, or those of their `_async` twins where they have one."""

    client: Any
    later: bool

    def __getattr__(self, name: str) -> Any:
        twin = getattr(self.client, f"{name}_async", None) if self.later else None
        if twin is None:
            return lambda *a, **k: got(getattr(self.client, name)(*a, **k))
        return lambda *a, **k: got(asyncio.run(twin(*a, **k)))


def got(found: Any) -> Any:
    """What a method gives: a future's result, or the value that some twins return themselves."""
    return found.result(120.0) if hasattr(found, "result") else found


@pytest.fixture(scope="module")
async def world(service: Service, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("named")
    (folder / BASE).symlink_to(MODEL)

    def work() -> World:
        client = client_of(service.url)
        rest, admin = (kind(base_url=service.url, api_key=KEY) for kind in CLIENTS[3:])
        training = client.create_lora_training_client(BASE, rank=4, seed=1).result()
        path = training.save_state("a").result().path
        sampler_path = training.save_weights_for_sampler("b").result().path
        sampling = client.create_sampling_client(model_path=sampler_path).result()
        return World(client, training, sampling, rest, admin, path, sampler_path, folder, service.url)

    return await call(work)


def datum(**inputs: Any) -> types.Datum:
    return types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [6, 7, 8, 9], **inputs})


def floats(*values: float) -> types.TensorData:
    return types.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def params(max_tokens: int | None = 4, **more: Any) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, **{"stop": [], **more})


def loss_of(client: Any) -> float:
    found = got(client.forward([datum()], "cross_entropy"))
    assert [len(out["logprobs"].data) for out in found.loss_fn_outputs] == [4]
    return found.metrics["loss:sum"]


def lengths_of(client: Any) -> list[int]:
    return [len(sequence.tokens) for sequence in got(client.sample(PROMPT, 2, params())).sequences]


# --- what each method gives ------------------------------------------------------------------------------------------


def lora(w: World) -> bool:
    client = w.service.create_lora_training_client(BASE, rank=2, train_mlp=False, user_metadata={"a": "b"})
    run = w.rest.get_training_run(client.model_id)
    return client.get_info().lora_rank == run.lora_rank == 2 and run.user_metadata == {"a": "b"}


def stepped(w: World) -> bool:
    losses = []
    for _ in range(2):
        losses.append(w.training.forward_backward([datum()], "cross_entropy").metrics["loss:sum"])
        assert w.training.optim_step(ADAM).metrics["grad_norm:mean"] > 0
    return losses[1] < losses[0]


def own_loss(_: Any, logprobs: list[torch.Tensor]) -> Any:
    return -sum(each.sum() for each in logprobs), {"mine": 1.0}


def traced_loss(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:sum": loss}


def traced(w: World) -> bool:
    client = client_of(w.url)  # a session takes each loss once
    training = client.create_lora_training_client(BASE, rank=2).result()
    handle = client.create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}).result()
    found = training.forward_backward_custom([datum(weights=floats(1, 1, 1, 1))], handle).result()
    return found.metrics["custom/mine:sum"] == pytest.approx(loss_of(training), rel=1e-4)


def closed(w: World) -> bool:
    client = client_of(w.url)
    session = client.create_lora_training_client(BASE, rank=2).result().model_id.partition(":")[0]
    client.close("success").result(60.0)
    return session in w.rest.list_sessions().sessions


def joined(w: World) -> bool:
    handle = w.sampling.get_sampler_handle()
    both = [tinker.SamplingClient.from_sampler_handle(handle, api_key=KEY) for _ in range(2)]
    return [lengths_of(each) for each in [*both, w.sampling]] == [[4, 4]] * 3


def tokenized(w: World) -> bool:
    with contextlib.chdir(w.folder):  # it is loaded by the base model's name
        return w.sampling.get_tokenizer().encode("25") == w.training.get_tokenizer().encode("25")


def deleted(w: World, method: str, *given: str) -> bool:
    path = w.training.save_state("gone", overwrite=True).path
    got(getattr(w.rest, method)(*(given or (path,))))
    return path not in [each.tinker_path for each in w.rest.list_checkpoints(w.run).checkpoints]


def changed(w: World, method: str, *given: Any) -> types.Checkpoint:
    got(getattr(w.rest, method)(w.path, *given))
    return next(each for each in w.rest.list_user_checkpoints().checkpoints if each.tinker_path == w.path)


CALLS: dict[str, Callable[[World], object]] = {
    "ServiceClient.close": closed,
    "ServiceClient.create_custom_loss": traced,
    "ServiceClient.create_lora_training_client": lora,
    "ServiceClient.create_rest_client": lambda w: got(w.service.create_rest_client().get_training_run(w.run)),
    "ServiceClient.create_sampling_client": lambda w: lengths_of(w.service.create_sampling_client(base_model=BASE)),
    "ServiceClient.create_training_client_from_state": lambda w: loss_of(
        w.service.create_training_client_from_state(w.path)
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda w: loss_of(
        w.service.create_training_client_from_state_with_optimizer(w.path)
    ),
    "ServiceClient.get_console_url": lambda w: w.service.get_console_url(),
    "ServiceClient.get_server_capabilities": lambda w: (
        [model.model_name for model in w.service.get_server_capabilities().supported_models] == [BASE]
    ),
    "ServiceClient.get_telemetry": lambda w: w.service.get_telemetry() is not None,
    "TrainingClient.create_sampling_client": lambda w: lengths_of(w.training.create_sampling_client(w.sampler_path)),
    "TrainingClient.forward": lambda w: loss_of(w.training) > 0,
    "TrainingClient.forward_backward": stepped,
    "TrainingClient.forward_backward_custom": lambda w: (
        w.training.forward_backward_custom([datum()], own_loss).metrics["mine"] == 1
    ),
    "TrainingClient.get_console_url": lambda w: w.training.get_console_url(),
    "TrainingClient.get_info": lambda w: w.training.get_info().model_data.model_name == BASE,
    "TrainingClient.get_telemetry": lambda w: w.training.get_telemetry() is not None,
    "TrainingClient.get_tokenizer": tokenized,
    "TrainingClient.load_state": lambda w: w.training.load_state(w.path).path == w.path,
    "TrainingClient.load_state_with_optimizer": lambda w: w.training.load_state_with_optimizer(w.path).path == w.path,
    "TrainingClient.optim_step": stepped,
    "TrainingClient.save_state": lambda w: w.training.save_state("again", 3600, True, {"c": "d"}).path,  # noqa: FBT003
    "TrainingClient.save_weights_and_get_sampling_client": lambda w: (
        lengths_of(w.training.save_weights_and_get_sampling_client()) == [4, 4]
    ),
    "TrainingClient.save_weights_for_sampler": lambda w: lengths_of(
        w.service.create_sampling_client(w.training.save_weights_for_sampler(f"at-{id(w)}", 3600).path)
    ),
    "SamplingClient.compute_logprobs": lambda w: len(w.sampling.compute_logprobs(PROMPT)) == len(TOKENS),
    "SamplingClient.create": lambda w: lengths_of(
        tinker.SamplingClient.create(client_of(w.url).holder, base_model=BASE).result()
    ),
    "SamplingClient.from_sampler_handle": joined,
    "SamplingClient.get_base_model": lambda w: w.sampling.get_base_model() == BASE,
    "SamplingClient.get_sampler_handle": joined,
    "SamplingClient.get_telemetry": lambda w: w.sampling.get_telemetry() is not None,
    "SamplingClient.get_tokenizer": tokenized,
    "SamplingClient.on_queue_state_change": lambda w: w.sampling.on_queue_state_change(QueueState.ACTIVE, None) is None,
    "SamplingClient.sample": lambda w: lengths_of(w.sampling) == [4, 4],
    "RestClient.delete_checkpoint": lambda w: deleted(w, "delete_checkpoint", w.run, "weights/gone"),
    "RestClient.delete_checkpoint_from_tinker_path": lambda w: deleted(w, "delete_checkpoint_from_tinker_path"),
    "RestClient.get_sampler": lambda w: (
        w.rest.get_sampler(w.rest.get_session(w.session).sampler_ids[0]).base_model == BASE
    ),
    "RestClient.get_server_capabilities": lambda w: (
        w.rest.get_server_capabilities().supported_models[0].max_context_length == 512
    ),
    "RestClient.get_session": lambda w: w.run in w.rest.get_session(w.session).training_run_ids,
    "RestClient.get_telemetry": lambda w: w.rest.get_telemetry() is not None,
    "RestClient.get_training_run": lambda w: w.rest.get_training_run(w.run).training_run_id == w.run,
    "RestClient.get_training_run_by_tinker_path": lambda w: (
        w.rest.get_training_run_by_tinker_path(w.path).training_run_id == w.run
    ),
    "RestClient.get_weights_info_by_tinker_path": lambda w: (
        w.rest.get_weights_info_by_tinker_path(w.path).lora_rank == 4
    ),
    "RestClient.list_checkpoints": lambda w: (
        w.path in [each.tinker_path for each in w.rest.list_checkpoints(w.run).checkpoints]
    ),
    "RestClient.list_sessions": lambda w: w.session in w.rest.list_sessions().sessions,
    "RestClient.list_training_runs": lambda w: (
        w.run in [run.training_run_id for run in w.rest.list_training_runs().training_runs]
    ),
    "RestClient.list_user_checkpoints": lambda w: w.rest.list_user_checkpoints(limit=1).cursor.total_count > 1,
    "RestClient.publish_checkpoint_from_tinker_path": lambda w: (
        changed(w, "publish_checkpoint_from_tinker_path").public
    ),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda w: (
        changed(w, "set_checkpoint_ttl_from_tinker_path", 7200).expires_at
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda w: (
        not changed(w, "unpublish_checkpoint_from_tinker_path").public
    ),
    "AdminClient.get_telemetry": lambda w: w.admin.get_telemetry() is not None,
}
"""By method: what is true of what it gives."""


def missing(method: str, path: str) -> str:
    return f"this service has no {method} /{path}"


def unsupported(name: str) -> str:
    return f"{name} is not supported by this service"


def project_of(w: World) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=w.url, api_key=KEY, project_id="p")


EXTERNAL = "tinker://{}/external_weights/a"
REFUSED: dict[str, tuple[Callable[[World], object], str]] = {
    "ServiceClient.copy_weights": (lambda w: project_of(w).copy_weights(w.path), missing("POST", "copy_weights")),
    "TrainingClient.save_weights_external": (
        lambda w: w.training.save_weights_external("a"),
        missing("POST", "save_weights_external"),
    ),
    "RestClient.assign_session_project": (
        lambda w: w.rest.assign_session_project(w.session, "p"),
        missing("PUT", "sessions/"),
    ),
    "RestClient.copy_weights": (lambda w: w.rest.copy_weights(w.path, "p"), missing("POST", "copy_weights")),
    "RestClient.export_session_trace": (
        lambda w: w.rest.export_session_trace(w.session),
        missing("GET", "sessions/"),
    ),
    "RestClient.get_audit_log": (lambda w: w.rest.get_audit_log(), missing("GET", "audit")),
    "RestClient.get_billing_usage": (
        lambda w: w.rest.get_billing_usage(starting_on="2026-01-01", ending_before="2026-01-02"),
        missing("GET", "billing"),
    ),
    "RestClient.get_current_checkpoint_storage_usage": (
        lambda w: w.rest.get_current_checkpoint_storage_usage(),
        missing("GET", "billing"),
    ),
    "RestClient.get_external_weights_urls": (
        lambda w: w.rest.get_external_weights_urls(EXTERNAL.format(w.run)),
        missing("GET", "training_runs/"),
    ),
    "RestClient.search_sessions": (
        lambda w: w.rest.search_sessions(types.SessionSearchRequest()),
        missing("POST", "sessions/search"),
    ),
    "RestClient.whoami": (lambda w: w.rest.whoami(), "whoami requires JWT auth"),
    "AdminClient.get_audit_log": (lambda w: w.admin.get_audit_log(), missing("GET", "audit")),
    "AdminClient.get_billing_usage": (
        lambda w: w.admin.get_billing_usage(starting_on="2026-01-01", ending_before="2026-01-02"),
        missing("GET", "billing"),
    ),
    "AdminClient.get_current_checkpoint_storage_usage": (
        lambda w: w.admin.get_current_checkpoint_storage_usage(),
        missing("GET", "billing"),
    ),
}
"""By method: a call, and the error that it gives."""


def sample(**more: Any) -> Callable[[World], Any]:
    given = {"prompt": PROMPT, "num_samples": 1, "sampling_params": params(), **more}
    return lambda w: w.sampling.sample(**given)


def tokens_of(found: types.SampleResponse) -> list[list[int]]:
    return [list(sequence.tokens) for sequence in found.sequences]


def stopped(w: World) -> bool:
    (whole,) = tokens_of(sample(sampling_params=params(12, temperature=0.0))(w))
    text = w.training.get_tokenizer().decode(whole)
    by = [[whole[3]], [text[4:6]], text[4:6]]
    cut = [sample(sampling_params=params(12, temperature=0.0, stop=stop))(w).sequences[0] for stop in by]
    return all(each.stop_reason == "stop" and list(each.tokens) == whole[: len(each.tokens)] for each in cut)


def trained(loss: str, *, config: Any = None, **inputs: Any) -> Callable[[World], bool]:
    def work(w: World) -> bool:
        found = w.training.forward_backward([datum(**inputs)], loss, config)
        return w.training.optim_step(ADAM).metrics["grad_norm:mean"] > 0 and "loss:sum" in found.metrics

    return work


def wide(*, sparse: bool) -> dict[str, types.TensorData]:
    """Three targets of each token, two of them with a weight."""
    targets = torch.tensor([[6, 7, 8], [7, 8, 9], [8, 9, 10], [9, 10, 11]])
    weights = torch.tensor([[0.5, 0.5, 0.0]] * 4)
    make = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
    return {"target_tokens": make(targets), "weights": make(weights)}


POLICY = {"logprobs": floats(-1, -2, -1, -2), "advantages": floats(1, -1, 1, 1)}
OPTIONS: dict[str, Callable[[World], object]] = {
    "stop": stopped,
    "inflight": lambda w: lengths_of(w.training.save_weights_and_get_sampling_client(kind="inflight")) == [4, 4],
    "cross_entropy": trained("cross_entropy", weights=floats(0, 1, 1, 0.5)),
    "2-D": trained("cross_entropy", **wide(sparse=False)),
    "sparse": trained("cross_entropy", **wide(sparse=True)),
    "importance_sampling": trained("importance_sampling", **POLICY),
    "ppo": trained("ppo", config={"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, **POLICY),
    "cispo": trained("cispo", **POLICY),
    "dro": trained("dro", config={"beta": 0.1}, **POLICY),
    "gspo": trained("gspo", **POLICY, sequence_ratio_mask=floats(1, 1, 1, 1)),
    "grad_clip_norm": lambda w: got(
        w.training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0, weight_decay=0.1))
    ),
}
"""By an option that the page names: what is true with it."""


def unstable(w: World) -> Any:
    sampling = w.service.create_sampling_client(base_model=BASE, record_stability_info=True)
    return got(sampling.sample(PROMPT, 1, params()))


PICTURE = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png"), *PROMPT.chunks])
REFUSED_OPTIONS: dict[str, tuple[Callable[[World], object], str]] = {
    "without max_tokens": (sample(sampling_params=params(None)), "max_tokens is missing"),
    "past the context": (sample(sampling_params=params(600)), "the model's context has"),
    "target_prompt_logprobs": (
        sample(target_prompt_logprobs=types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1])),
        unsupported("target_prompt_logprobs"),
    ),
    "prompt_alt_tokens_k": (sample(prompt_alt_tokens_k=2), unsupported("prompt_alt_tokens_k")),
    "record_stability_info": (unstable, unsupported("record_stability_info")),
    "top-k at most 20": (sample(topk_prompt_logprobs=21), "the engines give at most 20"),
    "images": (sample(prompt=PICTURE), "the prompt has a chunk of type"),
    "another base model": (lambda w: w.service.create_lora_training_client("other"), "this service trains"),
    "another optimizer": (
        lambda w: w.service.create_lora_training_client(BASE, optimizer=types.DimuonOptimizerConfig()),
        "is not supported here; use AdamParams",
    ),
    "another loss": (lambda w: w.training.forward([datum()], "other"), "is not supported here; use"),
    "a loss's own input": (trained("ppo"), "needs in loss_fn_inputs"),
    "a name that exists": (lambda w: w.training.save_state("a"), "is there already"),
    "a lost path": (lambda w: w.training.create_sampling_client(w.sampler_path + "x"), "there is no checkpoint"),
}
"""By what is asked: the request, and the error that it gives."""


# --- tests -----------------------------------------------------------------------------------------------------------


def methods(client: type) -> list[str]:
    """Public methods without the `_async` twins."""
    names = [name for name, value in inspect.getmembers(client, callable) if not name.startswith("_")]
    return [f"{client.__name__}.{name}" for name in names if not name.endswith("_async")]


def test_every_method_of_the_sdk_is_driven_here_and_named_on_the_page():
    known = [name for client in CLIENTS for name in methods(client)]
    assert sorted(known) == sorted(CALLS.keys() | REFUSED.keys())
    table = PAGE[PAGE.index("## Methods") : PAGE.index("## Tenants")]
    assert [name for name in known if f"`{name.partition('.')[2]}`" not in table] == []
    texts = [re.sub(r" [A-Z]+ /.*|; use .*", "", text) for _, text in [*REFUSED.values(), *REFUSED_OPTIONS.values()]]
    assert [text for text in texts if text not in table and text.partition(" ")[2] not in table] == []


def refused(w: World, calls: dict[str, tuple[Callable[[World], object], str]], name: str) -> None:
    ask, text = calls[name]
    with pytest.raises((tinker.TinkerError, RuntimeError), match=re.escape(text)):
        got(ask(w))


async def test_a_short_pass(world: World):
    w = world.driven()

    def work() -> None:
        for name in ("TrainingClient.optim_step", "SamplingClient.from_sampler_handle", "RestClient.get_sampler"):
            assert CALLS[name](w), name
        for name in ("stop", "sparse", "gspo"):
            assert OPTIONS[name](w), name
        refused(w, REFUSED, "TrainingClient.save_weights_external")
        for name in ("without max_tokens", "another loss"):
            refused(w, REFUSED_OPTIONS, name)
        assert CALLS["TrainingClient.optim_step"](w), "it trains on after what was refused"

    await call(work)


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CALLS)
async def test_a_method_gives_what_it_says(world: World, name: str, later: bool):  # noqa: FBT001
    assert await call(lambda: CALLS[name](world.driven(later=later)))


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_method_that_is_not_there_fails_with_its_error(world: World, name: str, later: bool):  # noqa: FBT001
    await call(lambda: refused(world.driven(later=later), REFUSED, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
async def test_an_option_does_what_it_says(world: World, name: str):
    assert await call(lambda: OPTIONS[name](world.driven()))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED_OPTIONS)
async def test_what_cannot_be_met_fails_with_the_reason(world: World, name: str):
    await call(lambda: refused(world.driven(), REFUSED_OPTIONS, name))
    assert await call(lambda: CALLS["TrainingClient.forward"](world.driven())), "the same client goes on"
