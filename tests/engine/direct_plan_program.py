"""Plans for real vLLM models, in a process of its own: vLLM's groups are global. Prints one line of JSON a model.

CPU kernels pack their weights, so on a CPU no model has a plan; here that packing is left out, and what remains of
loading is what a GPU does.
"""
# pyright: basic

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
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

from nano_models import save_dense, save_moe
from penstock.engine.vllm_plugin import reload
from penstock.engine.vllm_plugin.direct_load import DirectPlan, NotDirectError, Piece, _Proof, make_plan
from penstock.errors import TransferError
from penstock.weights.manifest import TensorEntry

CPU = torch.device("cpu")


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


def swapped(plan: DirectPlan) -> DirectPlan:
    """A plan that takes keys for queries: of equal shapes, so that nothing but the values tells."""
    pieces: dict[str, list[Piece]] = dict(plan._pieces)
    first, second = (f"model.layers.0.self_attn.{name}_proj.weight" for name in ("k", "v"))
    pieces[first], pieces[second] = pieces[second], pieces[first]
    return DirectPlan(pieces)


def examine(folder: Path, port: int) -> dict[str, Any]:
    """What the plan of a model is worth."""
    model, config = load(folder, port)
    entries = entries_of(folder)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with set_current_vllm_config(config):
        plan = make_plan(model, config.model_config, entries, CPU)
        found: dict[str, Any] = {"planned": plan is not None, "tensors": len(entries)}
        if plan is not None:
            found["in_place"] = sum(plan.place(entry) is not None for entry in entries)
            try:
                _Proof(model, entries, swapped(plan), CPU).run(config.model_config)
            except NotDirectError as error:
                found["swapped"] = str(error)
            sent = {entry.name: torch.randn(entry.shape) for entry in entries}
    unchanged = all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    found["unchanged"] = unchanged
    if plan is not None:
        for name, tensor in sent.items():
            plan.put(name, tensor)
        by_plan = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with set_current_vllm_config(config):
            model.load_weights(iter(sent.items()))
        found["as_vllm_loads"] = all(torch.equal(by_plan[name], p) for name, p in model.named_parameters())
    with torch.no_grad():
        found["failed_proof"] = fail_inside_a_proof(model, config, entries)
        found["repeated"] = cut_and_repeat(model, config, entries)
    return found


def fail_inside_a_proof(model: torch.nn.Module, config: Any, entries: list[TensorEntry]) -> dict[str, bool]:
    """No memory in the middle of a layer: there is no plan, and the model is as it was."""
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    calls, equal = iter(range(100)), torch.equal

    def out_of_memory(*tensors: torch.Tensor) -> bool:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return equal(*tensors)

    torch.equal = out_of_memory
    try:
        with set_current_vllm_config(config):
            plan = make_plan(model, config.model_config, entries, CPU)
    finally:
        torch.equal = equal
    same = all(before[name][0] is p and equal(before[name][1], p) for name, p in model.named_parameters())
    return {"plan": plan is not None, "same": same}


def cut_and_repeat(model: torch.nn.Module, config: Any, entries: list[TensorEntry]) -> bool:
    """Whether a reload that was cut in the middle of a layer can be done again, whole."""
    sent = {entry.name: torch.randn(entry.shape) for entry in entries}

    def cut() -> Any:
        for number, item in enumerate(sent.items()):
            if number == len(sent) // 2:
                raise TransferError("the trainer is gone")
            yield item

    with set_current_vllm_config(config):
        reload.begin(model)
        with suppress(TransferError):
            reload.receive(model, cut())
        reload.begin(model)
        reload.receive(model, iter(sent.items()))
        reload.finish(model, config.model_config)
        reloaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model.load_weights(iter(sent.items()))
    return all(torch.equal(reloaded[name], parameter) for name, parameter in model.named_parameters())


def main() -> None:
    """A dense model, one with tied embeddings, a mixture of experts."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod):
        method.process_weights_after_loading = lambda _self, _layer: None
    folders = {
        "moe": save_moe(folder / "moe"),  # first: its groups are those of a dense model and one more
        "dense": save_dense(folder / "dense", tied=False),
        "tied": save_dense(folder / "tied", tied=True),
    }
    for name, path in folders.items():
        print(json.dumps({"model": name, **examine(path, port if name == "moe" else 0)}), flush=True)


if __name__ == "__main__":
    main()
