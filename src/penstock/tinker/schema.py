"""The SDK's protobuf messages as `pb`, and a limit on their fields.

The messages are read from the installed `tinker` package without importing it. Its import loads torch, which takes
seconds, and memory that a process without a model does not need.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UserError

__all__ = ["JSON_TYPE", "PROTO_TYPE", "check_fields", "pb"]

PROTO_TYPE = "application/x-protobuf"
JSON_TYPE = "application/json"
_FILE = Path("proto", "tinker_public_pb2.py")


def _load() -> Any:
    if (loaded := sys.modules.get("tinker.proto.tinker_public_pb2")) is not None:
        return loaded
    package = find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        raise UserError("the Tinker service needs the SDK's schema: pip install 'penstock[tinker]'")
    file = Path(package.submodule_search_locations[0]) / _FILE
    spec = spec_from_file_location("penstock_tinker_pb2", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"the installed tinker has no {_FILE}; install a version that penstock[tinker] allows")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb
else:
    pb = _load()


# --- fields of training data -----------------------------------------------------------------------------------------

MOST_FIELDS = 1 << 18
"""Maximum number of fields in a body of training data. The SDK's chunks have at most 1,024 data of about 30 fields."""

_Fields = dict[int, Any]
"""Fields with a length, by number: a message's fields, or None for packed numbers. Text and bytes are left out."""


def check_fields(body: bytes) -> None:
    """Raise UserError for training data with too many fields, before it is parsed.

    protobuf has no limit. It parses 64 MiB of empty messages in 6 s, in which no other thread runs, and takes 1.8 GiB
    for them.
    """
    left, todo = MOST_FIELDS, [(0, len(body), _FIELDS)]
    if len(body) <= 2 * left:
        return  # each field has at least two bytes
    try:
        while todo:
            at, end, known = todo.pop()
            while at < end:
                tag, at = _varint(body, at)
                size, at = _varint(body, at) if tag & 7 in {0, 2} else (0, at + _FIXED.get(tag & 7, 0))
                left -= 1
                if tag & 7 == 2:  # noqa: PLR2004 - the wire type with a length
                    inside = known.get(tag >> 3, _TEXT)
                    if inside is None:
                        left -= size
                    elif inside is not _TEXT:
                        todo.append((at, at + size, inside))
                    at += size
                if left < 0:
                    raise UserError(
                        f"the request has more than {MOST_FIELDS} protobuf fields, as over 8,000 data of four inputs "
                        "have; send fewer data in a request, and the tokens of each datum as one chunk"
                    )
    except IndexError:
        raise UserError("the body is no ForwardBackwardRequest: it is cut off") from None


def _varint(body: bytes, at: int) -> tuple[int, int]:
    if (value := body[at]) < 128:  # noqa: PLR2004 - the last byte has no high bit
        return value, at + 1
    value, shift = value & 127, 7
    for place in range(at + 1, at + 10):
        value |= (body[place] & 127) << shift
        if body[place] < 128:  # noqa: PLR2004
            return value, place + 1
        shift += 7
    raise IndexError


def _fields_of(message: Any) -> _Fields:
    return {
        field.number: None if field.message_type is None else _fields_of(field.message_type)
        for field in message.fields
        if field.type not in {field.TYPE_STRING, field.TYPE_BYTES}
    }


_FIELDS, _TEXT = _fields_of(pb.ForwardBackwardRequest.DESCRIPTOR), _Fields()
_FIXED = {1: 8, 5: 4}
"""Bytes of the wire types without a length."""
