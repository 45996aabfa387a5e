"""Differences of vLLM 0.26 to 0.31. To end their support, remove this file and its calls in one commit.

vLLM 0.32 labels its weights and every token. `marks.py` does so for older versions, which
`cores.labels_weights` finds. `trainer_send_weights` of `native.py` can also be removed with 0.26.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.plugin.marks import send_mark


def run_server() -> None:
    """Run vLLM's API server."""
    if "--enable-return-routed-experts" in sys.argv:  # its second model runner does not report experts
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def add_labels(core_class: Any) -> None:
    """Give EngineCoreProc the newer versions' methods that set and return the label of tokens from now on."""
    core_class.set_weight_version = lambda core, label: send_mark(core, version=int(label))
    core_class.get_weight_version = lambda _: None  # only the API server sees a native update


def preempt(scheduler: Any, request: Any) -> None:
    """Preempt a request that was removed from `running`. No step may be under way."""
    if hasattr(request, "async_tokens_to_discard"):
        scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001
        request.async_tokens_to_discard, request.num_output_placeholders = request.num_output_placeholders, 0
    else:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)  # noqa: SLF001


def waiting_queues(scheduler: Any) -> list[Any]:
    """Return the scheduler's queues of requests without KV."""
    skipped = getattr(scheduler, "skipped_waiting", None)
    return [scheduler.waiting] if skipped is None else [skipped, scheduler.waiting]


def pause_mode(mode: str, wait_for_inflight_requests: bool | None) -> str:  # noqa: FBT001 - as in vLLM
    """Return the mode for `AsyncLLM.pause_generation`. The route of 0.26 has an older name for `wait`."""
    return "wait" if wait_for_inflight_requests else mode


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Replace LoRA wrappers by their inner layers during a load. No step may run.

    In 0.26 the model's own `load_weights` does not find `qkv_proj.weight` as `qkv_proj.base_layer.weight`. In 0.32 the
    wrappers know the names of their inner layers.
    """
    from vllm.lora.layers import BaseLayerWithLoRA  # noqa: PLC0415 - slow, and only needed with adapters

    wrappers = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for module, name, child in wrappers:
        setattr(module, name, child.base_layer)
    try:
        yield
    finally:
        for module, name, child in wrappers:
            setattr(module, name, child)
