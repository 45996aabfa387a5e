"""One version of a LoRA adapter for engines to load: PEFT's two files, the tensors in memory or in a shared folder.

On one host the tensors lie in a memfd, a file without a name, as `shared_memory.py` says. The settings travel with the
call.
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

from penstock.errors import WeightsError, parse_json
from penstock.weights.shared_memory import adopted_file, path_of, sealed_memory

if TYPE_CHECKING:
    import torch

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Where engines find a version of an adapter; `close` frees it.

    Attributes:
        place: `{"file", "config"}`: the path of a safetensors file, and PEFT's settings. `{"path"}`: a folder of
            PEFT's, or a name of the hub, which engines read as they see it. Both where both fit.
        nbytes: of the tensors; 0 where this process does not see them.
    """

    place: Mapping[str, Any]
    nbytes: int = 0
    fd: int | None = None
    folder: Path | None = None
    _key: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def source(self) -> dict[str, Any]:
        """`place`, and a `key` of these files alone, by which an engine finds what it has read of them."""
        return {**self.place, "key": self._key}

    @classmethod
    def of_tensors(
        cls, tensors: Iterable[tuple[str, Any]], config: Mapping[str, Any], *, shared: Path | None = None
    ) -> AdapterFiles:
        """Write tensors once.

        Args:
            tensors: `(PEFT's name, torch tensor or numpy array)`, such as
                `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
            config: PEFT's `adapter_config`: `r`, `lora_alpha`, `target_modules` and what else it has.
            shared: a folder that engines on other hosts see under the same path; None: all are on this host.

        Raises:
            WeightsError: no tensor, a name twice, NaN or infinity, settings without a rank, or a full disk.
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
        """Copy what PEFT has saved to a folder, since it may be saved again; what is no such folder is left to engines.

        With `fixed` the files may be replaced and deleted, but are not written again: they are kept open, not copied.

        Raises:
            WeightsError: the settings cannot be read, or one of the two is no regular file.
        """
        with ExitStack() as undo:
            try:
                undo.callback(os.close, fd := _opened(Path(path, TENSORS)))
                with open(_opened(Path(path, SETTINGS)), "rb") as opened:
                    data = opened.read()
            except OSError:  # other files, a name of the hub, or a folder on the engines' host
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
        """Keep what another process of this user has written, also when that ends. WeightsError: it is gone."""
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
        """Free it; engines must not need it any more. Call it once."""
        if self.fd is not None:
            os.close(self.fd)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _opened(path: Path) -> int:
    """Open a file to read it; a pipe or a device, which may let a read wait for ever, is refused."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise WeightsError(f"{path} is no regular file; give a folder with PEFT's {TENSORS} and {SETTINGS}")
    return fd


def _checked(tensors: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    import torch  # noqa: PLC0415 - the core must import without torch

    found: dict[str, torch.Tensor] = {}
    for name, given in tensors:
        # A copy, since safetensors refuses tensors that share memory.
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
    """What JSON has instead of PEFT's sets, and of enums and numbers of numpy."""
    if isinstance(value, (set, frozenset)):
        return sorted(cast("set[str]", value))
    return value.item() if hasattr(value, "item") else str(value)
