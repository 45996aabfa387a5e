"""The head of a safetensors file: where in it each tensor lies.

The format: eight bytes with the length of a JSON object, the object, and then the tensors without gaps
(https://github.com/huggingface/safetensors, "Format"). Spaces may follow the object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.types import TensorSpec
from penstock.weights.manifest import TensorEntry

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
"""Dtypes by torch's name, as the format has them."""

_ALIGNMENT = 256


def header(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """The bytes before the first tensor, and each tensor's offset from the start of the file.

    Args:
        specs: in the order they lie; of descending element size, so that each is aligned to its own.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: list[int] = []
    end = 0
    for spec in specs:
        begin, end = end, end + TensorEntry(spec.name, spec.dtype, spec.shape, 0, 0).nbytes
        fields[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        offsets.append(begin)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]
