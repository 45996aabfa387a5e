"""LoRA adapters of a simulated engine."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import UserError
from penstock.sim.config import SimConfig
from penstock.wire import Notes


class NotFoundError(UserError):
    """No model or adapter of that name; `param` is the field of the request that named it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Adapters:
    """Loaded LoRA adapters: by name what decides their tokens, a path or a digest of their bytes."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self.loaded: dict[str, str] = {}
        self._versions: dict[str, int] = {}
        self._used: dict[str, float] = {}

    def note_use(self, name: str | None) -> None:
        """A request for it has come."""
        if name is not None:
            self._used[name] = time.monotonic()

    def notes(self, name: str | None) -> Notes | None:
        """Return what its tokens are labelled with, as our plugin in vLLM does."""
        if name is None or self._config.plain:
            return None
        notes: Notes = {"adapter": name}
        if (version := self._versions.get(name)) is not None:
            notes["adapter_version"] = version
        return notes

    def served(self, name: str, in_flight: int) -> dict[str, Any]:
        """Return its version, its requests, and since when it had none."""
        idle_s = time.monotonic() - self._used[name]
        return {"version": self._versions.get(name), "in_flight": in_flight, "idle_s": idle_s}

    def forget(self, name: str) -> None:
        """Forget one; harmless if there is none."""
        self.loaded.pop(name, None)
        self._versions.pop(name, None)

    def load(self, name: str, path: str, *, in_place: bool = False, version: int | None = None) -> None:
        """Load one. Requests in flight under this name continue with the new weights, as in vLLM.

        Raises:
            UserError: the name is taken and `in_place` is not set, or there is no room.
        """
        if not name or not path:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._config.served_model_name:
            raise UserError(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.loaded and not in_place:
            raise UserError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if name not in self.loaded and len(self.loaded) >= self._config.max_loras:
            raise UserError(f"No room for lora adapter '{name}': {self._config.max_loras} are loaded.")
        self.loaded[name] = path
        self._versions.pop(name, None)
        if version is not None:
            self._versions[name] = version
        self.note_use(name)

    def unload(self, name: str) -> None:
        """Forget one. Raises NotFoundError."""
        if not name:
            raise UserError("'lora_name' needs to be provided to unload a LoRA adapter.")
        if self.loaded.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.")

    def path(self, name: str | None) -> str:
        """Path of an adapter; empty for the base model and for an adapter unloaded under its requests."""
        return self.loaded.get(name, "") if name is not None else ""


def content_of(source: Mapping[str, Any]) -> str:
    """Return what decides the tokens of an adapter: a digest of its bytes, or its path where there are none to read.

    Raises:
        UserError: its file is gone.
    """
    if (file := source.get("file")) is None:
        return str(source.get("path") or "")
    try:
        return f"{zlib.crc32(Path(file).read_bytes()):08x}"
    except OSError as error:
        raise UserError(f"the adapter's file {file} cannot be read: {error.strerror}") from error
