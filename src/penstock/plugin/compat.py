"""Differences of vLLM 0.26 to 0.31. To end their support, remove this file and its calls in one commit.

vLLM 0.32 labels its weights and every token. For older versions, this module keeps the version in force on both sides,
just as exactly. The core sends its outputs, and a mark of each update, over one ordered channel. After a pause, all
outputs of the old weights are processed once the queue behind that channel is empty (`TokenVersions.settle`).

`trainer_send_weights` of `native.py` can also be removed with 0.26.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import StateError
from penstock.wire import INITIAL_VERSION, Notes, version_number, version_of_tokens

MARK = "penstock:"
"""Prefix of the id of an output that belongs to no request. JSON follows, which applies to later outputs."""
OUTPUTS_PER_TICK = 128
"""Outputs after which vLLM's output handler yields to the loop (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE's default)."""


def run_server() -> None:
    """Run vLLM's API server with the token endpoint, an option of newer versions."""
    if importlib.util.find_spec("vllm.entrypoints.launchers") is None:
        if "--enable-return-routed-experts" in sys.argv:  # its second model runner does not report experts
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
        return
    sys.argv.append("--enable-scale-out")
    importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()


# --- in the core's process -------------------------------------------------------------------------------------------


def core_label(core: Any) -> int | None:
    """Return the core's label for tokens; None on 0.26, where only the API server sees a native update."""
    return core_version(core) if hasattr(core, "get_weight_version") else None


def core_version(core: Any) -> int:
    """Return the version of a core's weights: its label, or our last update's."""
    if hasattr(core, "get_weight_version"):
        return _version_of(core.get_weight_version())
    return getattr(core, "_penstock_version", 0)


def label_core(core: Any, version: int) -> None:
    """Label tokens that this core makes from now on."""
    if hasattr(core, "set_weight_version"):
        core.set_weight_version(str(version))
        return
    core._penstock_version = version  # noqa: SLF001
    send_mark(core, version=version)


def send_mark(core: Any, **said: Any) -> None:
    """Send a message between outputs to every API server (`TokenVersions`).

    `version` is the version of the weights. `adapter` and `adapter_version` apply to the core `engine_index`, because
    no vLLM labels adapters. `kept` lists requests that keep KV of older weights. `anew` lists those that recompute it.
    """
    name = MARK + json.dumps(said)
    put_output(core, range(len(core.addresses.outputs)), request_id=name)


def put_output(core: Any, clients: Iterable[int], **fields: Any) -> None:
    """Send some API servers an output that no step made."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs  # noqa: PLC0415 - only inside vLLM

    output = EngineCoreOutput(new_token_ids=[], **fields)
    for client in clients:
        core.output_queue.put_nowait((client, EngineCoreOutputs(outputs=[output])))


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


# --- in the API server's process -------------------------------------------------------------------------------------


def labels_weights(engine: Any) -> bool:
    """Whether an AsyncLLM labels its weights."""
    return hasattr(engine, "update_weight_version")


def pause_mode(mode: str, wait_for_inflight_requests: bool | None) -> str:  # noqa: FBT001 - as in vLLM
    """Return the mode for `AsyncLLM.pause_generation`. The route of 0.26 has an older name for `wait`."""
    return "wait" if wait_for_inflight_requests else mode


class TokenVersions:
    """The weights that make the tokens of one API server's engine."""

    def __init__(self) -> None:
        self.version = 0
        """The last version that was set, for an engine without labels."""
        self.adapters: dict[tuple[int, str], Notes] = {}
        """Labels of an adapter's tokens, by the core's number and the adapter's name."""
        self._kept: set[str] = set()
        """Requests with KV of older weights."""

    def install(self, engine: Any) -> None:
        processor = engine.output_processor
        processor.process_outputs = functools.partial(self._process, processor, processor.process_outputs)

    def _process(self, processor: Any, process_outputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # A mark comes alone and belongs to no request. vLLM ignores it.
        if len(outputs) == 1 and outputs[0].request_id.startswith(MARK):
            said = json.loads(outputs[0].request_id.removeprefix(MARK))
            self.version = said.get("version", self.version)
            if "adapter" in said:
                self.adapters[said.pop("engine_index"), said["adapter"]] = said
            if "kept" in said:
                self._kept = {name for name in (*self._kept, *said["kept"]) if name in processor.request_states}
            self._kept.difference_update(said.get("anew", ()))
        return process_outputs(outputs, *args, **kwargs)

    def notes_of(self, state: Any, core: int) -> Notes | None:
        """Return further notes on a RequestState's newest tokens on this core."""
        notes = Notes(kv_kept=True) if state.request_id in self._kept else Notes()
        if (name := state.lora_name) is not None:
            notes |= self.adapters.get((core, name)) or {"adapter": name}
        return notes or None

    def of_newest(self, state: Any) -> int:
        labels = getattr(state, "weight_version_starts", None)
        return version_of_tokens(labels[-1][0]) if labels else self.version

    async def in_force(self, engine: Any) -> int:
        """Return the version of the engine's weights. StateError: their label is not a version."""
        return _version_of(await engine.get_weight_version()) if labels_weights(engine) else self.version

    async def label(self, engine: Any, version: int) -> None:
        """Label tokens from now on. The engine must be paused."""
        if labels_weights(engine):
            await engine.update_weight_version(str(version))
        else:
            await self.settle(engine)
            self.version = version

    async def settle(self, engine: Any) -> None:
        """After a pause, return once every earlier output of the cores has been counted."""
        if labels_weights(engine):
            return
        queue = engine.engine_core.outputs_queue
        while not queue.empty():  # noqa: ASYNC110 - vLLM's queue has no event for this
            await asyncio.sleep(0)  # lets the output handler in this loop run
        for _ in range(2 + len(engine.output_processor.request_states) // OUTPUTS_PER_TICK):
            await asyncio.sleep(0)


def seed_versions(state: Any, versions: Sequence[Sequence[int]]) -> None:
    """Give vLLM's RequestState the `[version, tokens]` parts of a resumed sample."""
    if hasattr(state, "weight_version_starts"):
        start = 0
        for version, tokens, *_ in versions:
            state.weight_version_starts.append((INITIAL_VERSION if version == 0 else str(version), start))
            start += tokens


def _version_of(label: str) -> int:
    try:
        return version_number(label)
    except ValueError:
        raise StateError(
            f"the engine's weights are labelled {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}, or the number that they have'
        ) from None


# --- on a worker -----------------------------------------------------------------------------------------------------


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
