"""The SDK's protobuf messages, as `pb`.

They are read from the installed `tinker` package without importing it: its import loads torch, which takes seconds and
memory that a process without a model does not need.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UserError

__all__ = ["JSON_TYPE", "PROTO_TYPE", "pb"]

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
