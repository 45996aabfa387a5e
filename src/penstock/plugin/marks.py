"""A core's marks between its outputs, which bring the versions of tokens to its API servers.

vLLM 0.32 labels its weights and every token. For older versions, and for adapters and kept KV, marks say what is in
force, just as exactly: they go over the ordered channel of the outputs (`hooks.TokenVersions` reads them).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.plugin.hooks import MARK


def send_mark(core: Any, **said: Any) -> None:
    """Send a message between outputs to every API server.

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
