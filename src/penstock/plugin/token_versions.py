"""The versions of the weights that make tokens, and a core's marks that bring them to its API servers.

vLLM 0.32 labels its weights and every token. For older versions, and for adapters and kept KV, this module keeps what
is in force on both sides, just as exactly. The core sends its outputs, and a mark of each update, over one ordered
channel. After a pause, all outputs of the old weights are processed once the queue behind that channel is empty
(`TokenVersions.settle`).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import StateError
from penstock.wire import INITIAL_VERSION, Notes, version_number, version_of_tokens

MARK = "penstock:"
"""Prefix of the id of an output that belongs to no request. JSON follows, which applies to later outputs."""
OUTPUTS_PER_TICK = 128
"""Outputs after which vLLM's output handler yields to the loop (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE's default)."""


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


def labels_weights(engine: Any) -> bool:
    """Whether an AsyncLLM labels its weights."""
    return hasattr(engine, "update_weight_version")


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
        return version_of_label(await engine.get_weight_version()) if labels_weights(engine) else self.version

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


def version_of_label(label: str) -> int:
    """Return the version that a label of weights names. StateError: it names none."""
    try:
        return version_number(label)
    except ValueError:
        raise StateError(
            f"the engine's weights are labelled {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}, or the number that they have'
        ) from None
