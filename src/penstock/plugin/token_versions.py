"""A core's marks between its outputs, which bring the versions of tokens to its API servers.

vLLM 0.32 labels its weights and every token. For older versions, and for adapters and kept KV, marks say what is in
force, just as exactly: they go over the ordered channel of the outputs (`hooks.TokenVersions` reads them).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.errors import StateError
from penstock.wire import version_number

MARK = "penstock:"
"""Prefix of the id of an output that belongs to no request. JSON follows, which applies to later outputs."""


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


def version_of_label(label: str) -> int:
    """Return the version that a label of weights names. StateError: it names none."""
    try:
        return version_number(label)
    except ValueError:
        raise StateError(
            f"the engine's weights are labelled {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}, or the number that they have'
        ) from None
