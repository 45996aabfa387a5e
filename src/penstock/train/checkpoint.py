"""Checkpoints of a run: a folder each, whole or absent.

The tensors are in the format of `torch.distributed.checkpoint`, which any number of ranks can write and another number
read. `record.json` holds everything that is no tensor, and the CRC-32 of each file.
"""

# torch.distributed.checkpoint ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from penstock.errors import CheckpointError, parse_json

FORMAT = "penstock-checkpoint-3"
KEEP = 2
"""Checkpoints kept: the last, and the one before it in case the last cannot be read."""
RECORD = "record.json"

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished"
_LITTLE = 64 << 20
"""Free bytes of a disk on which a checkpoint failed that call it full."""
_REMEDY = "remove it to go on from the checkpoint before it, or start a new run without --resume"


def save(run_dir: Path, step: int, write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Write `run_dir/checkpoints/step-N` and remove all but the last `KEEP` checkpoints.

    The folder appears under its name only when all of it is on the disk, so a kill at any moment leaves the checkpoint
    before it.

    Args:
        run_dir: of the run.
        step: that it is of.
        write: writes files into the folder it is given, and returns what else `load` shall give, as JSON.

    Raises:
        CheckpointError: the disk refused, or a value is not JSON.
    """
    folder = run_dir / "checkpoints"
    path = folder / f"step-{step:08d}"
    unfinished = folder / f"{path.name}{_UNFINISHED}"
    with ExitStack() as last, _refusals(path):
        for useless in folder.glob(f"*{_UNFINISHED}"):  # left by a kill
            shutil.rmtree(useless)
        unfinished.mkdir(parents=True)
        last.callback(shutil.rmtree, unfinished, ignore_errors=True)
        values = write(unfinished)
        files = _checksums(unfinished, [file.name for file in unfinished.iterdir()])
        record = {"format": FORMAT, "step": step, "files": files, "values": values}
        (unfinished / RECORD).write_text(json.dumps(record, allow_nan=False))
        for file in (*unfinished.iterdir(), unfinished):
            _flush(file)
        shutil.rmtree(path, ignore_errors=True)  # of a run that was taken up again before it
        unfinished.replace(path)
        _flush(folder)
        for useless in _checkpoints(folder)[:-KEEP]:
            shutil.rmtree(useless)
    return path


def rewrite(path: Path, values: Mapping[str, Any]) -> None:
    """Replace what `load` gives of a checkpoint beside its tensors, wholly or not at all."""
    with _refusals(path):
        unfinished, record = path / f"{RECORD}{_UNFINISHED}", json.loads((path / RECORD).read_text())
        unfinished.write_text(json.dumps({**record, "values": values}, allow_nan=False))
        _flush(unfinished)
        unfinished.replace(path / RECORD)
        _flush(path)


def latest(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step in `run_dir`, or None where there is none."""
    found = _checkpoints(run_dir / "checkpoints")
    return found[-1] if found else None


def latest_step(run_dir: Path) -> int:
    """The step that `latest` is of; 0 where there is none."""
    path = latest(run_dir)
    match = _NAME.fullmatch(path.name) if path is not None else None
    return int(match[1]) if match else 0


def load(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Read a checkpoint's step and what `write` returned; its tensors are `read_tensors`' to read.

    Raises:
        CheckpointError: missing, damaged, or not one of ours; says which file, and what to do.
    """
    try:
        record = parse_json((path / RECORD).read_bytes(), "its record", loads=json.loads)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no checkpoint of Penstock ({FORMAT}); {_REMEDY}")
        for name, checksum in _checksums(path, record["files"]).items():
            if checksum != record["files"][name]:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is not as it was written; {_REMEDY}")
        return int(record["step"]), record["values"]
    except FileNotFoundError as error:
        what = "is no checkpoint, or not all of one" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}: there is no {error.filename}; {_REMEDY}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is truncated or damaged ({error}); {_REMEDY}") from error


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write tensors into a folder, of sharded ones each rank its part.

    Args:
        folder: of the checkpoint; all ranks see it.
        tensors: by names that are the same on every rank.
        group: of the ranks, on CPUs; None: this process alone.

    Raises:
        CheckpointError: the disk refused, on any rank.
    """
    with _refusals(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone, and of what torch deprecates
        dcp.save(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=group is None)


def read_tensors(
    folder: Path,
    blank: Callable[[str, Sequence[int], torch.dtype], Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Read what `write_tensors` wrote, by any number of ranks.

    Args:
        folder: of the checkpoint.
        blank: makes room for a tensor of a name, shape and dtype: a sharded one is filled with this rank's part.
        group: see `write_tensors`.

    Raises:
        CheckpointError: it cannot be read, on any rank.
    """
    planner = _Blanks(blank)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load({}, checkpoint_id=folder, planner=planner, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:  # no Exception, by torch's choice
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({_first(error)}); if that is for lack of memory, free some or take "
            "more ranks, and if a file is missing or damaged, go on from another checkpoint"
        ) from error
    return planner.tensors


class _Blanks(dcp.DefaultLoadPlanner):
    """Makes room for what a checkpoint holds, where torch tells every rank of what fails on one of them."""

    def __init__(self, blank: Callable[[str, Sequence[int], torch.dtype], Tensor]) -> None:
        super().__init__()
        self._blank = blank
        self.tensors: dict[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        del state_dict  # nothing is known before the checkpoint's metadata
        for name, entry in metadata.state_dict_metadata.items() if metadata is not None else ():
            if isinstance(entry, TensorStorageMetadata):
                self.tensors[name] = self._blank(name, entry.size, entry.properties.dtype)
        super().set_up_planner(self.tensors, metadata, is_coordinator)


@contextmanager
def _refusals(path: Path) -> Generator[None]:
    """Say of what the disk refused where, and what to do."""
    try:
        yield
    except (OSError, dcp.api.CheckpointException) as error:
        why = str(error) if isinstance(error, OSError) else _first(error)
        # torch's own words for a full disk are "unexpected pos".
        free = next(shutil.disk_usage(near).free for near in path.parents if near.exists())
        full = "the disk is full, or nearly so: " if free < _LITTLE else ""
        raise CheckpointError(
            f"cannot write checkpoint {path}: {full}{why} ({free >> 20} MiB free there); free space or choose another "
            "run_dir"
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: a value is not JSON, or a tensor cannot be stored: {error}"
        ) from error


def _first(error: dcp.api.CheckpointException) -> str:
    """What the first rank that failed says."""
    rank, (cause, _) = min(error.failures.items())
    lines = str(cause).strip().splitlines()
    return f"rank {rank}: {type(cause).__name__}: {lines[0] if lines else ''}"


def _checkpoints(folder: Path) -> list[Path]:
    """All of them, oldest step first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of files by name: a third of the time that hashlib's fastest takes, and chance is all it has to see."""

    def checksum(name: str) -> int:
        crc = 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                crc = zlib.crc32(chunk, crc)
        return crc

    chosen = list(names)
    with ThreadPoolExecutor() as pool:  # zlib lets go of the GIL
        return dict(zip(chosen, pool.map(checksum, chosen), strict=True))


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
