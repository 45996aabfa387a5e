"""A learner of several ranks, over gloo, in processes of their own."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import weakref
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from random_trajectories import trajectories_of
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from training_setup import save_nano_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from nano_models import SHAPE, save_moe, save_routed
from penstock.config import LoraConfig, TrainConfig
from penstock.control_types import TensorSpec
from penstock.errors import CheckpointError, ConfigError, StateError, UserError
from penstock.rollout.generator import Trajectory
from penstock.train import checkpoint
from penstock.train.grpo import Trainee, datum_of
from penstock.train.interface import AdamSpec, Datum, Learner, LoraSpec
from penstock.train.learner import LocalLearner
from penstock.train.loading import ModuleLoader
from penstock.train.losses import LossSpec
from penstock.train.ranked import RankedLearner
from penstock.train.ranks import RankGroup, Ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONFIG = TrainConfig(threads=1, micro_batch_tokens=64, learning_rate=1e-2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[RankGroup]:
    """Two ranks, this process and another one, for learners one after another."""
    model = str(save_nano_model(tmp_path_factory.mktemp("first")))
    async with Ranks(2, tmp_path_factory.mktemp("ranks"), {}) as ranks:
        await ranks.load(model, CONFIG, seed=0)
        assert ranks._group is not None
        yield ranks._group


def learner_of(group: RankGroup, model: str, config: TrainConfig = CONFIG) -> RankedLearner:
    return RankedLearner(group, model, config, seed=0, served_dtype="float32")


def together(group: RankGroup, model: str, config: TrainConfig = CONFIG) -> Trainee:
    return Trainee(learner_of(group, model, config), config)


def alone(model: str, config: TrainConfig = CONFIG) -> Trainee:
    return Trainee(LocalLearner(model, config, seed=0), config)


async def test_twenty_steps_equal_those_of_one_process(group: RankGroup, micro_model: str):
    one = alone(micro_model)
    two = together(group, micro_model)
    for name, tensor in two.learner.weights(None):
        assert torch.equal(tensor, dict(one.learner.weights(None))[name]), name
    for step in range(20):
        batch = trajectories_of(one, seed=step, version=step)
        expected, found = one.step(batch), await asyncio.to_thread(two.step, batch)
        for name in expected.keys() - {"seconds", "tokens_per_second"}:
            assert abs(found[name] - expected[name]) < 1e-4 + 1e-3 * abs(expected[name]), (step, name)
    assert two.version == one.version == 20
    worst = max(
        (tensor - dict(one.learner.weights(None))[name]).abs().max() for name, tensor in two.learner.weights(None)
    )
    assert worst < 1e-3


def held(trainee: Trainee) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainee.learner.weights(None)}


async def test_two_ranks_take_up_what_one_wrote_and_one_what_two_wrote(
    group: RankGroup, micro_model: str, tmp_path: Path
):
    one = alone(micro_model)
    batches = [trajectories_of(one, seed=step, version=step) for step in range(4)]
    one.step(batches[0])
    first = checkpoint.save(tmp_path, 1, one.save)
    two = together(group, micro_model)
    two.load(first, checkpoint.load(first)[1])
    assert two.version == 1
    same(held(one), held(two))
    for batch in batches[1:3]:
        await asyncio.to_thread(two.step, batch)
    second = checkpoint.save(tmp_path, 3, two.save)
    written = held(two)
    two.step(batches[3])
    after = held(two)
    two.load(second, checkpoint.load(second)[1])  # exactly back, and exactly on
    same(written, held(two))
    two.step(batches[3])
    same(after, held(two))
    again = alone(micro_model)
    again.load(second, checkpoint.load(second)[1])
    assert again.version == 3
    same(written, held(again))
    assert again.step(batches[3])["loss"] == pytest.approx(one_after(one, batches[1:]), rel=1e-3, abs=1e-5)


def one_after(one: Trainee, batches: list[list[Trajectory]]) -> float:
    return [one.step(batch)["loss"] for batch in batches][-1]


def same(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> None:
    assert these.keys() == those.keys()
    for name, tensor in these.items():
        assert torch.equal(tensor, those[name]), name


async def test_a_checkpoint_of_another_model_is_refused_by_all_ranks_and_changes_nothing(
    group: RankGroup, micro_model: str, tmp_path: Path
):
    other = alone(str(save_nano_model(tmp_path / "other")))
    path = checkpoint.save(tmp_path, 1, other.save)
    two = together(group, micro_model)
    before = held(two)
    with pytest.raises(CheckpointError, match="another model"):
        two.load(path, checkpoint.load(path)[1])
    same(before, held(two))
    assert two.step(trajectories_of(alone(micro_model)))["grad_norm"] > 0


async def test_a_gradient_that_is_no_number_on_one_rank_is_refused_by_all(group: RankGroup, micro_model: str):
    data = [datum(0.5), replace(datum(-3e38), logprobs=[0.0, -20.0, -20.0])]  # beyond what floats hold
    config = CONFIG.model_copy(update={"micro_batch_tokens": 1})  # a micro-batch each
    two = together(group, micro_model, config)
    before = held(two)
    outputs = two.learner.forward_backward(None, LossSpec({"dapo": 1.0}), data)
    assert not math.isfinite(outputs.losses["dapo"])
    with pytest.raises(StateError, match="nothing was changed"):
        two.learner.optim_step(None, AdamSpec(), scale=1.0)
    same(before, held(two))
    two.learner.forward_backward(None, LossSpec({"dapo": 1.0}), data[:1])  # one micro-batch for two ranks
    assert two.learner.optim_step(None, AdamSpec(), scale=1.0) > 0
    two.learner.forward_backward(None, LossSpec({"dapo": 1.0}), data[:1])
    two.learner.discard_gradient(None)
    assert two.learner.optim_step(None, AdamSpec(), scale=1.0) == 0
    assert two.version == 2


@pytest.mark.parametrize(
    ("loss", "given", "why"),
    [
        ("gspo_token", {}, "needs data with sequence_ratio_mask"),
        ("kl", {}, "needs data with reference logprobs"),
        ("dapo", {"experts": [[[0]]] * 3}, "experts cannot be replayed"),
        ("dapo", {"input_ids": [1, 200, 3]}, "sample 0 of the data has the input token 200, .* tokens 0 to "),
    ],
)
async def test_what_a_loss_refuses_of_one_ranks_data_is_refused_by_all_at_once(
    group: RankGroup, micro_model: str, loss: str, given: dict[str, Any], why: str
):
    two = together(group, micro_model).learner
    with pytest.raises((UserError, ConfigError), match=why):
        two.forward_backward(None, LossSpec({loss: 1.0}), [replace(datum(1.0), **given)])
    two.forward_backward(None, LossSpec({"dapo": 1.0}), [datum(1.0)])
    assert two.optim_step(None, AdamSpec(), scale=1.0) > 0


async def test_a_refusal_in_the_midst_of_a_step_does_not_leave_the_others_waiting(
    group: RankGroup, micro_model: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise UserError("only here")

    part = learner_of(group, micro_model)._part
    monkeypatch.setattr(LocalLearner, "_measure", refuse)
    loss = LossSpec({"dapo": 1.0})
    with pytest.raises(RuntimeError, match="rank 0 refused in the midst of a step: only here"):
        part._measure(part._share(LocalLearner._batches(part, [datum(1.0)], loss))[0], loss)


async def test_a_checkpoint_that_one_rank_cannot_read_is_refused_by_all(
    group: RankGroup, micro_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("not on this host")

    two = together(group, micro_model)
    path = checkpoint.save(tmp_path, 1, two.save)
    values, before = checkpoint.load(path)[1], held(two)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemReader, "read_metadata", missing)  # of rank 0 alone
        with pytest.raises(CheckpointError, match=r"cannot be read .rank 0: .*(not on this host|metadata is None)"):
            two.load(path, values)
    same(before, held(two))
    two.load(path, values)


async def test_a_gather_stays_out_of_torchs_registry_of_works(group: RankGroup, micro_model: str):
    """What is in it goes the way on which gloo corrupts the heap, and stays there if its reader breaks off."""
    before = _get_work_registry_size()
    passed = iter(learner_of(group, micro_model).weights(None))
    for _ in range(3):  # the next unit is under way
        next(passed)
        assert _get_work_registry_size() == before


async def test_a_batch_below_the_bound_is_shared_by_the_ranks(group: RankGroup, micro_model: str):
    part, loss = learner_of(group, micro_model)._part, LossSpec({"dapo": 1.0})
    shares = [len(batch.indices) for batch in part._share(LocalLearner._batches(part, [datum(1.0)] * 6, loss))]
    assert shares == [3], "and the other rank has the other three"


def datum(advantage: float) -> Datum:
    return Datum([1, 2, 3], [2, 3, 4], [0.0, 1.0, 1.0], [0.0, -1.0, -1.0], [advantage] * 3)


async def test_the_same_data_in_the_same_order_come_back(group: RankGroup, micro_model: str):
    one = alone(micro_model)
    data = [Datum([1] * n, list(range(n)), [1.0] * n, [-1.0] * n, [n / 9] * n) for n in (7, 1, 12, 3, 9)]
    loss = LossSpec({"dapo": 1.0}, all_logprobs=True)
    two = together(group, micro_model)
    expected, found = one.learner.forward(None, loss, data), two.learner.forward(None, loss, data)
    for theirs, ours in zip(expected.logprobs, found.logprobs, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found.losses == pytest.approx(expected.losses)
    assert found.denominators == expected.denominators
    assert "gspo" not in found.losses
    with pytest.raises(KeyError):
        found.losses["gspo"]
    with pytest.raises(UserError, match="unknown loss 'x'"):
        two.learner.forward(None, LossSpec({"x": 1.0}), data)
    with pytest.raises(UserError, match="no adapter 'a'"):
        two.learner.forward("a", loss, data)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)


async def test_logprobs_sent_as_references_cost_their_own_bytes_alone(group: RankGroup, micro_model: str):
    """Pickle writes the whole memory behind each view: 512 rows that shared theirs took 512 times their bytes."""
    data = [Datum([1] * 64, [2] * 64, [1.0] * 64, [-1.0] * 64, [0.5] * 64)] * 64
    rows = learner_of(group, micro_model).forward(None, LossSpec({}), data).logprobs
    assert len(pickle.dumps([replace(datum, reference=row) for datum, row in zip(data, rows, strict=True)])) < 1 << 17


async def test_adapters_on_two_ranks_are_those_of_one_process(group: RankGroup, micro_model: str, tmp_path: Path):
    config = CONFIG.model_copy(update={"lora": LoraConfig()})
    one, two = alone(micro_model, config), together(group, micro_model, config)
    loss, adam = LossSpec({"dapo": 1.0}), AdamSpec(learning_rate=1e-2)
    data = [datum_of(t, 1.0 + n) for n, t in enumerate(trajectories_of(alone(micro_model)))]
    for learner in (one.learner, two.learner):
        learner.forward(None, loss, data)  # the base's weights have been gathered before they are frozen
        for name, rank in (("a", 2), ("b", 4)):
            learner.create_adapter(name, LoraSpec(rank=rank, seed=rank))
        for name in ("a", "b", "a"):
            learner.forward_backward(name, loss, data)
            learner.optim_step(name, adam, scale=0.1)
    assert two.learner.versions == one.learner.versions
    assert two.learner.adapter_config("a") == one.learner.adapter_config("a")
    for adapter in ("a", "b"):
        close(dict(two.learner.weights(adapter)), dict(one.learner.weights(adapter)))
    close(dict(two.learner.merged_weights("a")), {n: t.clone() for n, t in one.learner.merged_weights("a")})
    same(held(two), held(one))  # frozen
    path = checkpoint.save(tmp_path, 1, lambda folder: two.learner.save("a", folder))
    again = alone(micro_model, config).learner
    again.create_adapter("a", LoraSpec(rank=2))
    again.load("a", path, checkpoint.load(path)[1])
    same(dict(two.learner.weights("a")), dict(again.weights("a")))
    two.learner.create_adapter("c", LoraSpec(rank=2))
    two.learner.set_adapter("c", dict(two.learner.weights("a")))
    for adapter in ("c", "a"):  # every rank has it: they compute together
        two.learner.forward_backward(adapter, loss, data)
    same(dict(two.learner.weights("a")), dict(two.learner.weights("c")))
    with pytest.raises(UserError, match="has the shape None, and this model's"):
        two.learner.set_adapter("c", {})
    two.learner.drop_adapter("a")
    with pytest.raises(UserError, match="no adapter 'a'"):
        two.learner.forward("a", loss, data)


async def test_a_merged_base_is_rounded_once_by_ranks_too(group: RankGroup, micro_model: str):
    config = CONFIG.model_copy(update={"lora": LoraConfig()})
    one: Learner = LocalLearner(micro_model, config, seed=0, served_dtype="bfloat16")
    two = RankedLearner(group, micro_model, config, seed=0, served_dtype="bfloat16")
    random = torch.Generator().manual_seed(1)
    for learner in (one, two):
        learner.create_adapter("a", LoraSpec(rank=2))
    tensors = {name: 0.1 * torch.randn(t.shape, generator=random) for name, t in one.weights("a")}
    for learner in (one, two):
        learner.set_adapter("a", tensors)
    same(dict(two.merged_weights("a")), {name: t.clone() for name, t in one.merged_weights("a")})


def close(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> None:
    assert these.keys() == those.keys()
    for name, tensor in these.items():
        torch.testing.assert_close(tensor, those[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("save", [save_moe, save_routed])
async def test_experts_are_gathered_under_the_names_of_the_checkpoint(
    group: RankGroup, tmp_path: Path, save: Callable[[Path], Path]
):
    model = str(save(tmp_path / "model"))
    learner = RankedLearner(group, model, CONFIG, seed=0, served_dtype="auto")
    found = dict(learner.weights(None))
    same(found, dict(LocalLearner(model, CONFIG, seed=0, served_dtype="auto").weights(None)))
    specs = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in found.items()]
    assert learner.weights(None).specs == specs


async def test_rows_that_the_ranks_do_not_share_evenly_come_whole(group: RankGroup, tmp_path: Path):
    config = Qwen3Config(**SHAPE | {"vocab_size": 25, "intermediate_size": 49, "tie_word_embeddings": False})
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    same(held(together(group, str(tmp_path))), held(alone(str(tmp_path))))


async def test_bf16_weights_give_about_the_gradient_of_bf16_by_autocast(group: RankGroup, micro_model: str):
    config = CONFIG.model_copy(update={"dtype": "bfloat16", "recompute": "full"})
    batch = trajectories_of(alone(micro_model))
    one, two = alone(micro_model, config).step(batch), together(group, micro_model, config).step(batch)
    assert two["loss"] == pytest.approx(one["loss"], rel=0.05, abs=0.01)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.2)


def save_deep(folder: Path, dtype: torch.dtype, **shape: int) -> str:
    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **{**SHAPE, **shape})).to(dtype).save_pretrained(folder)
    return str(folder)


async def test_weights_that_are_stored_in_half_precision_are_trained_in_fp32(group: RankGroup, tmp_path: Path):
    model = save_deep(tmp_path / "half", torch.bfloat16)
    one, two = alone(model), together(group, model)
    batch = trajectories_of(one)
    first, second = one.step(batch), two.step(batch)
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)
    there = dict(one.learner.weights(None))
    for name, tensor in two.learner.weights(None):
        assert tensor.dtype == torch.float32
        assert (tensor - there[name]).abs().mean() < 1e-6  # in half precision 1e-5


def save_mixed(folder: Path) -> str:
    """A checkpoint of two dtypes and in several files."""
    save_deep(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files: dict[str, str] = {}
    for number in range(2):
        part = {
            name: tensor.float() if "down_proj" in name or "norm" in name else tensor
            for name, tensor in list(tensors.items())[number::2]
        }
        save_file(part, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")  # of another program
    return str(folder)


async def test_a_rank_holds_its_shards_and_a_layer_while_it_loads(
    group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, load = save_mixed(tmp_path / "mixed"), ModuleLoader.load
    whole: list[int] = []

    def counting(self: ModuleLoader, module: torch.nn.Module) -> None:
        load(self, module)
        values = [p for p in self._model.parameters() if not p.is_meta and not isinstance(p, DTensor)]
        whole.append(sum(p.numel() for p in values))

    monkeypatch.setattr(ModuleLoader, "load", counting)
    two, one = together(group, model), alone(model)
    same(held(two), held(one))
    assert whole[:-1] == [sum(p.numel() for p in layer.parameters()) for layer in one.learner.policy.layers]


async def test_no_more_than_two_layers_are_whole_at_once(group: RankGroup, tmp_path: Path):
    learner = learner_of(group, save_deep(tmp_path / "deep", torch.float32, num_hidden_layers=6, hidden_size=64))
    sizes = {spec.name: math.prod(spec.shape) for spec in learner.weights(None).specs or ()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    alive: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        alive[key] = tensor.numel()
        weakref.finalize(tensor.untyped_storage(), alive.pop, key, None)

    whole = torch.Tensor.new_empty
    most = 0

    def counting(self: torch.Tensor, *shape: int, **options: Any) -> torch.Tensor:
        nonlocal most
        made = whole(self, *shape, **options)
        count(made)
        most = max(most, sum(alive.values()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", counting)
        seen = sum(tensor.numel() for _, tensor in learner.weights(None))
    assert seen == sum(sizes.values())
    assert layer < most <= 2 * layer < seen / 2
