"""Plans for real vLLM models, in a process of its own: vLLM's groups are global. Prints one line of JSON a model.

CPU kernels pack their weights, so on a CPU no model has a plan; here that packing is left out, and what remains of
loading is what a GPU does.
"""
# pyright: basic

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import initialize_model

from nano_models import save_biased, save_dense, save_moe, save_routed
from penstock.errors import TransferError
from penstock.plugin import worker as loading
from penstock.plugin.direct import DirectLoads, DirectPlan, make_plan
from penstock.weights.manifest import TensorEntry

CPU = torch.device("cpu")
LAYER = "model.layers.{}.self_attn.{}_proj.{}"
WEIGHTS = LAYER.format(0, "k", "weight"), LAYER.format(0, "v", "weight")
BIASES = LAYER.format(0, "k", "bias"), LAYER.format(0, "v", "bias")
ROUTERS = tuple(f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1))
PAIRS = {"dense": [WEIGHTS], "tied": [WEIGHTS], "moe": [WEIGHTS], "biased": [WEIGHTS, BIASES]} | {
    "routed": [WEIGHTS, BIASES, ROUTERS]
}
"""Tensors of one shape, so that nothing but the values tells them apart."""


def load(folder: Path, port: int) -> tuple[torch.nn.Module, Any]:
    """The model as a worker has it, and its config."""
    args = EngineArgs(model=str(folder), enforce_eager=True, dtype="float32", kv_cache_memory_bytes=2**20)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if port:
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1)
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        record_metadata_for_reloading(model)
    return model, config


def entries_of(folder: Path) -> list[TensorEntry]:
    """As a trainer would send them."""
    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return [TensorEntry(name, "float32", shape, 0, 0) for name, shape in shapes.items()]


def held(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer of every module, in order."""
    return [
        (f"{prefix}.{name}", tensor)
        for prefix, module in model.named_modules()
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]


@contextmanager
def unchanged(model: torch.nn.Module, found: dict[str, Any], name: str) -> Iterator[None]:
    """Note whether the model has the same tensors afterwards, in the same memory, bit for bit."""
    before = [(name, tensor, tensor.data_ptr(), bits(tensor).clone()) for name, tensor in held(model)]
    yield
    after = held(model)
    found[name] = [name for name, _ in after] == [name for name, *_ in before] and all(
        now is then and now.data_ptr() == where and torch.equal(bits(now), bits_then)
        for (_, now), (_, then, where, bits_then) in zip(after, before, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is a NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Bench:
    """One model, what a trainer would send it, and what was found."""

    def __init__(self, model: torch.nn.Module, config: Any, entries: list[TensorEntry]) -> None:
        self.model, self.config, self.entries = model, config, entries
        self.sent = {entry.name: torch.randn(entry.shape) for entry in entries}
        self.found: dict[str, Any] = {"tensors": len(entries)}

    def plan(self) -> DirectPlan | None:
        return make_plan(self.model, self.entries)

    def loader(self, plan: DirectPlan | None) -> loading.Loader:
        """One that has this plan to prove, as if it ran on a GPU."""
        loader = loading.Loader(worker(self, CPU))
        loader.direct = DirectLoads()
        loader.direct.plan = plan
        return loader

    def load(self, loader: loading.Loader, source: Any = None) -> bool:
        """Load what was sent."""
        source = source or Sent(self.sent)
        with torch.no_grad(), instead(torch.accelerator, "synchronize", lambda: None):
            return loader.load(SimpleNamespace(tensors=self.entries), source)  # type: ignore[arg-type]

    def loaded(self) -> bool:
        """Whether the model has what was sent, as its own `load_weights` puts it there; it has, afterwards."""
        had = [tensor.detach().clone() for tensor in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model.load_weights(iter(self.sent.items()))  # pyright: ignore[reportCallIssue]
        return all(torch.equal(then, now) for then, now in zip(had, self.model.parameters(), strict=True))


class Sent:
    """A source of these tensors."""

    compares, asked_for_places = True, False

    def __init__(self, sent: dict[str, torch.Tensor]) -> None:
        self._sent = sent

    def tensors(self, manifest: Any, place: Callable[[TensorEntry], torch.Tensor | None]) -> Iterator[Any]:
        for entry in manifest.tensors:
            memory = place(entry)
            self.asked_for_places |= memory is not None
            yield entry, self._sent[entry.name] if memory is None else memory.copy_(self._sent[entry.name])


def prove_and_copy(bench: Bench) -> None:
    """A plan, the first update, which proves it, and the second, which it copies."""
    found = bench.found
    with unchanged(bench.model, found, "unchanged"):
        plan = bench.plan()
    assert plan is not None, "no plan"
    found["in_place"] = sum(plan.place(entry) is not None for entry in bench.entries)
    loader = bench.loader(plan)
    found["first_known"] = bench.load(loader)
    found["proved"] = loader.direct.proved
    found["first_as_vllm_loads"] = bench.loaded()
    bench.sent = {name: torch.randn_like(tensor) for name, tensor in bench.sent.items()}
    found["second_known"] = bench.load(loader, second := Sent(bench.sent))
    found["second_in_place"] = second.asked_for_places
    found["as_vllm_loads"] = bench.loaded()


def swap(bench: Bench, pairs: list[tuple[str, str]]) -> None:
    """Plans that take one tensor for another, or leave one out: whether they are proved, and what is loaded then."""
    bench.found["swapped"] = []
    for first, second in pairs:
        for other in ("swapped", "left out"):
            plan = bench.plan()
            assert plan is not None
            if other == "swapped":
                plan.pieces[first], plan.pieces[second] = plan.pieces[second], plan.pieces[first]
            else:
                del plan.pieces[first]
            loader = bench.loader(plan)
            bench.load(loader)
            bench.found["swapped"].append([loader.direct.proved, loader.direct.plan is not None, bench.loaded()])


@contextmanager
def instead(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Another function there, for as long as this lasts."""
    original = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, original)


def cut_and_repeat(bench: Bench) -> bool:
    """Whether a reload that was cut in the middle of a layer can be done again, whole."""

    def cut() -> Any:
        for number, item in enumerate(bench.sent.items()):
            if number == len(bench.sent) // 2:
                raise TransferError("the trainer is gone")
            yield item

    loading.begin(bench.model)
    with suppress(TransferError):
        loading.receive(bench.model, cut())
    loading.begin(bench.model)
    loading.receive(bench.model, iter(bench.sent.items()))
    loading.finish(bench.model, bench.config.model_config)
    return bench.loaded()


def from_memory_that_is_reused(bench: Bench) -> bool:
    """Whether a reload without a plan is right where a tensor is gone once the next is asked for."""

    def tensors(_manifest: Any, _place: Any) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        memory = torch.empty(max(tensor.numel() for tensor in bench.sent.values()))
        for entry in bench.entries:
            tensor = memory[: entry.nbytes // 4].view(entry.shape)
            tensor.copy_(bench.sent[entry.name])
            yield entry, tensor
            memory.fill_(torch.nan)

    bench.load(bench.loader(bench.plan()), SimpleNamespace(tensors=tensors))
    return bench.loaded()


def worker(bench: Bench, device: torch.device) -> Any:
    """As much of vLLM's as a loader needs."""
    runner = SimpleNamespace(get_model=lambda: bench.model)
    return SimpleNamespace(device=device, model_runner=runner, model_config=bench.config.model_config)


def refused(bench: Bench) -> dict[str, Any]:
    """Whether models that do more than copy have a plan."""
    model, found = bench.model, {}
    load_weights, outside, weight = model.load_weights, torch.zeros(4), model.lm_head.weight

    def also(more: Callable[[], Any]) -> Any:
        return instead(model, "load_weights", lambda weights: (load_weights(weights), more()))

    model.derived = derived = torch.zeros(4)
    with also(lambda: setattr(model, "derived", model.lm_head.weight * 2)):
        found["keeps what it computes"] = bench.plan() is not None or model.derived is not derived
    del model.derived
    with also(lambda: setattr(model, "derived", model.lm_head.weight * 2)):
        found["keeps what it has not kept before"] = bench.plan() is not None or hasattr(model, "derived")
    with also(lambda: outside.add_(1)):
        found["counts"] = bench.plan() is not None or bool(outside.any())
    where = weight.data_ptr()
    with also(lambda: setattr(weight, "data", weight.data.clone())):
        found["moves a weight"] = bench.plan() is not None or weight.data_ptr() != where
    scale = TensorEntry("model.layers.0.self_attn.attn.k_scale", "float32", (1,), 0, 0)
    found["scales a KV cache"] = make_plan(model, [*bench.entries, scale]) is not None
    return found


def sinks(bench: Bench) -> dict[str, bool]:
    """Whether there is a plan with attention that computes with a copy of the sinks, or with the sinks themselves."""
    impl = next(module.impl for module in bench.model.modules() if hasattr(module, "impl"))
    kind, found = type(impl), {}

    class Deriving(kind):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...

    impl.__class__ = Deriving
    found["unknown"] = bench.plan() is not None
    source = impl._sinks_source = torch.ones(4, dtype=torch.bfloat16)
    for name, kept in {"copied": source.float(), "shared": source}.items():
        impl.sinks = kept
        found[name] = bench.plan() is not None
    impl.__class__ = kind
    return found


def frees(bench: Bench) -> list[int]:
    """How often torch's unused GPU memory was given back: by the end of a reload on a GPU, and on a CPU."""

    class OnGPU(torch.nn.Module):
        def parameters(self, **_: Any) -> Iterator[Any]:
            yield SimpleNamespace(device=torch.device("cuda"))

    calls: list[None] = []
    counts: list[int] = []
    with instead(torch.cuda, "empty_cache", lambda: calls.append(None)):
        loading.finish(OnGPU(), bench.config.model_config)
        counts.append(len(calls))
        loading.begin(bench.model)
        loading.finish(bench.model, bench.config.model_config)
        counts.append(len(calls))
    return counts


def examine(name: str, folder: Path, port: int) -> dict[str, Any]:
    """What the plan of a model is worth."""
    model, config = load(folder, port)
    bench = Bench(model, config, entries_of(folder))
    with set_current_vllm_config(config):
        prove_and_copy(bench)
        swap(bench, PAIRS[name])
        with torch.no_grad():
            bench.found["repeated"] = cut_and_repeat(bench)
            bench.found["reused"] = from_memory_that_is_reused(bench)
        if name == "dense":
            with unchanged(model, bench.found, "unchanged_by_refused"):
                bench.found |= {"refused": refused(bench), "sinks": sinks(bench), "freed": frees(bench)}
    return bench.found


def main() -> None:
    """A mixture of experts, a dense model, one with tied embeddings, and two with biases that vLLM's reload leaves."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = lambda _self, _layer: None
    in_place = lambda _self, layer: layer.w13_weight.data.copy_(layer.w13_weight.data)  # noqa: E731 - as 0.32 on GPUs
    UnquantizedFusedMoEMethod.process_weights_after_loading = in_place
    folders = {
        "moe": save_moe(folder / "moe"),  # first: its groups are those of a dense model and one more
        "dense": save_dense(folder / "dense", tied=False),
        "tied": save_dense(folder / "tied", tied=True),
        "biased": save_biased(folder / "biased"),
        "routed": save_routed(folder / "routed"),
    }
    for name, path in folders.items():
        print(json.dumps({"model": name, **examine(name, path, port if name == "moe" else 0)}), flush=True)


if __name__ == "__main__":
    main()
