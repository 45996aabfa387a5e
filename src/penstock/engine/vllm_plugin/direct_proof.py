"""The proof of a plan: what vLLM's reload makes of random tensors is, bit for bit, what the copies make.

The reload takes the tensors in force from their modules and would copy to them at its end, which is where the plan is
compared instead. Some it leaves where they are (`SKIP_TENSORS`), and loads into them: those have a copy in their place
meanwhile. A write to any other memory that was there before is refused before it happens.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from penstock.engine.vllm_plugin.direct_plan import (
    DirectPlan,
    NotDirectError,
    dtype_of,
    memories_of,
    memory_of,
    written,
)
from penstock.weights.manifest import TensorEntry


class Proof:
    """Compares, layer by layer, what vLLM's reload of random tensors would put in force with what the plan makes."""

    def __init__(
        self, model: torch.nn.Module, entries: Sequence[TensorEntry], plan: DirectPlan, device: torch.device
    ) -> None:
        self._model = model
        self._entries = entries
        self._plan = plan
        self._device = device
        self._sent: dict[str, torch.Tensor] = {}
        self._shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._proved: set[int] = set()
        self._problems: list[str] = []

    def run(self, model_config: Any) -> None:
        """Raise NotDirectError where they differ. The model comes out as it went in, whatever happens between."""
        load_weights: Any = self._model.load_weights
        with (
            _NoWrites(),
            _shadowed(self._model) as self._shadows,
            _put_back_after(self._model),
            self._nothing_in_force(),
        ):
            layerwise.initialize_layerwise_reload(self._model)
            load_weights(self._random_tensors())
            layerwise.finalize_layerwise_reload(self._model, model_config)
            for live, shadow in self._shadows.values():  # only now: vLLM waits for none of them
                self._check(live, shadow, live.detach().clone())
        for name, parameter in self._model.named_parameters():
            if parameter.numel() and memory_of(parameter) not in self._proved:
                self._problems.append(f"{name} was not loaded")
        if self._problems:
            raise NotDirectError("; ".join(self._problems[:3]))

    @contextmanager
    def _nothing_in_force(self) -> Iterator[None]:
        """Take the place of what writes to tensors in force at the end of vLLM's reload (0.26 to 0.32)."""
        originals = layerwise._copy_and_restore_kernel_tensors, layerwise._finalize_attention_layer  # noqa: SLF001
        layerwise._copy_and_restore_kernel_tensors = self._compare  # noqa: SLF001
        layerwise._finalize_attention_layer = self._leave  # noqa: SLF001
        try:
            yield
        finally:
            layerwise._copy_and_restore_kernel_tensors, layerwise._finalize_attention_layer = originals  # noqa: SLF001
            self._sent.clear()

    def _random_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._entries:
            seed = torch.Generator(self._device).manual_seed(zlib.crc32(entry.name.encode()))
            dtype = dtype_of(entry)
            made_in = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32
            tensor = torch.rand(entry.shape, generator=seed, device=self._device, dtype=made_in).to(dtype)
            if self._plan.knows(entry.name):  # others are of another rank's part of the model
                self._sent[entry.name] = tensor
            yield entry.name, tensor
            del tensor  # before the next one is made

    def _compare(self, layer: torch.nn.Module, info: Any) -> None:
        """In place of vLLM's copy."""
        info.loaded_weights.clear()  # all are in; what is compared goes, before the next is made
        parameters, buffers = info.kernel_tensors
        for name, live in [*parameters.items(), *buffers.items()]:
            filled = name in parameters or self._plan.of_memory(live)
            if filled and id(live) not in self._shadows:
                self._check(live, getattr(layer, name), torch.zeros_like(live))  # vLLM fills padding with zeros
        layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001

    def _check(self, live: torch.Tensor, loaded: torch.Tensor, made: torch.Tensor) -> None:
        """Compare what vLLM has loaded for a tensor with what the copies make of `made`, which is as large."""
        pieces = self._plan.of_memory(live)
        for source, piece in pieces:
            offset = piece.target.storage_offset() - live.storage_offset()
            target = made.as_strided(piece.target.shape, piece.target.stride(), offset)
            if source in self._sent:
                target.copy_(piece.of(self._sent[source]))
        if not torch.equal(made, loaded.detach()):
            first = pieces[0][0] if pieces else "nothing"
            self._problems.append(f"the copies of {first}, and of what lies beside it, are not what vLLM loads")
        if pieces:
            self._proved.add(memory_of(live))
        for source, _ in pieces:
            self._sent.pop(source, None)

    def _leave(self, layer: torch.nn.Module, info: Any, _model_config: Any) -> None:
        """In place of what vLLM does with an attention layer: it has derived nothing (`_refuse_what_derives`)."""
        if info.loaded_weights:
            self._problems.append(f"a {type(layer).__name__} loads scales")
        layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001


@contextmanager
def _shadowed(model: torch.nn.Module) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Put copies in the place of what vLLM's reload leaves on its module and loads into as it is.

    Yields:
        By the identity of each copy, what it stands for and the copy.
    """
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, live)
        for module in model.modules()
        for held in (module._parameters, module._buffers)  # noqa: SLF001 - setattr would change their order
        for name, live in held.items()
        if live is not None and name in SKIP_TENSORS
    ]
    copies: dict[int, torch.Tensor] = {}
    for _, _, live in places:
        if id(live) not in copies:
            copies[id(live)] = copy = live.data.clone()
            copy.__class__ = live.__class__
            vars(copy).update(vars(live))
    try:
        for held, name, live in places:
            held[name] = copies[id(live)]
        yield {id(copies[id(live)]): (live, copies[id(live)]) for _, _, live in places}
    finally:
        for held, name, live in places:
            held[name] = live


@contextmanager
def _put_back_after(model: torch.nn.Module) -> Iterator[None]:
    """Give the layers back what they had, wherever a reload ends."""
    kept = [
        (layer, get_layer_params_buffers(layer), set(layer._non_persistent_buffers_set))  # noqa: SLF001
        for layer in model.modules()
    ]
    try:
        yield
    finally:
        for layer, tensors, non_persistent in kept:
            _put_back(layer, tensors, non_persistent)


def put_back(model: torch.nn.Module) -> None:
    """End a reload of vLLM's that was cut: layers that wait for tensors get back those that they had."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            _put_back(layer, info.kernel_tensors, info.kernel_non_persistent_buffers)


def _put_back(layer: torch.nn.Module, tensors: Any, non_persistent: Any) -> None:
    info = layerwise.get_layerwise_info(layer)
    if tensors is not None:
        parameters, buffers = tensors
        then, now = {**parameters, **buffers}, get_layer_tensors(layer)
        if now.keys() != then.keys() or any(now[name] is not live for name, live in then.items()):
            info.kernel_tensors, info.kernel_non_persistent_buffers = tensors, non_persistent
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001
    info.reset()


class _NoWrites(TorchDispatchMode):
    """Refuses to write to memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written(func, args, kwargs):
            if tensor.numel() and memory_of(tensor) not in self._made:
                raise NotDirectError(f"loading calls {func} on what is in force")
        result = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # how `torch.tensor` shows what it has made
            self._made |= memories_of(result)
        elif _makes(func):
            self._made |= memories_of(result) - memories_of((args, kwargs))
        return result


@functools.cache
def _makes(func: Any) -> bool:
    """Whether an operator returns more than views of what it is given."""
    return any(returned.alias_info is None for returned in func._schema.returns)  # noqa: SLF001 - it has no public name
