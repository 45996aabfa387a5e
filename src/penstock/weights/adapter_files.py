"""One version of a LoRA adapter for engines: PEFT's two files, with the tensors in memory or in a shared folder.

On one host the tensors lie in a memfd, a file without a name (see `shared_memory.py`). The settings travel in the
control call.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.checks import parse_json
from penstock.errors import WeightsError
from penstock.weights.shared_memory import adopted_file, path_of, sealed_memory

if TYPE_CHECKING:
    import torch

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Location of an adapter's version for engines. `close` frees it.

    Attributes:
        place: `{"file", "config"}` is the path of a safetensors file, and PEFT's settings. `{"path"}` is PEFT's folder
            or a hub name, which engines resolve themselves. Both are given if both apply.
        nbytes: bytes of the tensors; 0 if this process cannot see them.
    """

    place: Mapping[str, Any]
    nbytes: int = 0
    fd: int | None = None
    folder: Path | None = None
    _key: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def source(self) -> dict[str, Any]:
        """`place` with a unique `key`, by which an engine finds its earlier read."""
        return {**self.place, "key": self._key}

    @classmethod
    def of_tensors(
        cls, tensors: Iterable[tuple[str, Any]], config: Mapping[str, Any], *, shared: Path | None = None
    ) -> AdapterFiles:
        """Write tensors to memory, or to a new folder in `shared`.

        Args:
            tensors: pairs of PEFT's name and a torch tensor or numpy array. A name is for example
                `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
            config: PEFT's `adapter_config`: `r`, `lora_alpha`, `target_modules` and any other settings.
            shared: folder that engines on other hosts see under the same path; None if all engines are on this host.

        Raises:
            WeightsError: no tensor, a repeated name, NaN or infinity, incomplete settings, or a full disk.
        """
        from safetensors.torch import save  # noqa: PLC0415 - the core must import without torch

        data = save(_checked(tensors))
        settings = _settings(config)
        if shared is None:
            return cls._in_memory(len(data), settings, lambda memory: memory.write(data))
        folder = shared / f"adapter-{secrets.token_hex(8)}"
        try:
            folder.mkdir(mode=0o700, parents=True)
            (folder / TENSORS).write_bytes(data)
            (folder / SETTINGS).write_text(json.dumps(settings))
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsError(f"an adapter cannot be written to {folder}: {error.strerror}") from error
        return cls({"path": str(folder)}, len(data), folder=folder)

    @classmethod
    def of_folder(cls, path: str, *, fixed: bool = False) -> AdapterFiles:
        """Copy an adapter from PEFT's folder, which may be overwritten later. Leave other paths to engines.

        With `fixed`, the files may be replaced or deleted but not overwritten. They are kept open instead of copied.

        Raises:
            WeightsError: the settings are unreadable, or one of the two files is not a regular file.
        """
        with ExitStack() as undo:
            try:
                undo.callback(os.close, fd := _opened(Path(path, TENSORS)))
                with open(_opened(Path(path, SETTINGS)), "rb") as opened:
                    data = opened.read()
            except OSError:  # the folder has other files or is on the engines' host, or the path is a hub name
                return cls({"path": path})
            settings, size = _settings(parse_json(data, SETTINGS, WeightsError)), os.fstat(fd).st_size
            if fixed:
                undo.pop_all()
                return cls({"file": path_of(fd), "config": settings, "path": path}, size, fd=fd)
            copied = io.BufferedReader(io.FileIO(fd, closefd=False)).readinto
            files = cls._in_memory(size, settings, copied)
        return cls({**files.place, "path": path}, size, fd=files.fd)

    @classmethod
    def adopt(cls, source: Mapping[str, Any]) -> AdapterFiles:
        """Keep another process's files beyond its end. WeightsError: they are gone."""
        file = source.get("file")
        if file is None:
            return cls(dict(source))
        fd = adopted_file(file)
        return cls({**source, "file": path_of(fd)}, os.fstat(fd).st_size, fd=fd)

    @classmethod
    def _in_memory(cls, size: int, config: Mapping[str, Any], fill: Callable[[mmap.mmap], int | None]) -> AdapterFiles:
        fd, memory = sealed_memory("penstock-adapter", max(1, size))
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            with memory:
                filled = fill(memory)
            if filled != size:
                raise WeightsError(f"the adapter's file has {size} bytes, of which {filled} came: is it being written?")
            undo.pop_all()
        return cls({"file": path_of(fd), "config": dict(config)}, size, fd=fd)

    def close(self) -> None:
        """Free the files. Engines must not need them any more. Call it once."""
        if self.fd is not None:
            os.close(self.fd)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _opened(path: Path) -> int:
    """Open a file for reading. Refuse a pipe or a device, which may block forever."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise WeightsError(f"{path} is no regular file; give a folder with PEFT's {TENSORS} and {SETTINGS}")
    return fd


def _checked(tensors: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    import torch  # noqa: PLC0415 - the core must import without torch

    found: dict[str, torch.Tensor] = {}
    for name, given in tensors:
        # Copied, because safetensors refuses tensors that share memory.
        tensor = torch.as_tensor(given).detach().to("cpu", copy=True).contiguous()
        if name in found:
            raise WeightsError(f"the adapter's tensor {name!r} came twice")
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"the adapter's tensor {name!r} holds NaN or infinity")
        found[name] = tensor
    if not found:
        raise WeightsError("the adapter has no tensor")
    return found


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    if missing := [name for name in ("r", "lora_alpha", "target_modules") if not config.get(name)]:
        raise WeightsError(f"the adapter's config lacks {', '.join(missing)}; give PEFT's adapter_config as a mapping")
    return {"peft_type": "LORA", "bias": "none", **json.loads(json.dumps(dict(config), default=_plain))}


def _plain(value: Any) -> Any:
    """Convert PEFT's sets, and enums and numbers of numpy, to values that JSON has."""
    if isinstance(value, (set, frozenset)):
        return sorted(cast("set[str]", value))
    return value.item() if hasattr(value, "item") else str(value)
