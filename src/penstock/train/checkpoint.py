"""Checkpoints of a run: one folder each, complete or absent.

The tensors are in the format of `torch.distributed.checkpoint`. Any number of ranks can write it, and another number
can read it. `record.json` holds everything else, and the CRC-32 of each file.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.checks import parse_json
from penstock.errors import CheckpointError

FORMAT = "penstock-checkpoint-3"
KEEP = 2
"""Number of checkpoints kept: the last, and the one before it in case the last is unreadable."""
RECORD = "record.json"

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished"
_LITTLE = 64 << 20
"""Free bytes below which a failed write is reported as a full disk."""
_REMEDY = "remove it to go on from the checkpoint before it, or start a new run without --resume"


def save(run_dir: Path, step: int, write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Write `run_dir/checkpoints/step-N`, and keep only the last `KEEP` checkpoints.

    The folder gets its name only when its whole content is on disk. A kill at any moment leaves the previous
    checkpoint. `write` writes files into the given folder, and returns the JSON values that `load` shall return.

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
        shutil.rmtree(path, ignore_errors=True)  # from before a resume at an earlier step
        unfinished.replace(path)
        _flush(folder)
        for useless in [*_checkpoints(folder).values()][:-KEEP]:
            shutil.rmtree(useless)
    return path


def rewrite(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the values of a checkpoint that are no tensors. All or nothing is replaced."""
    with _refusals(path):
        unfinished, record = path / f"{RECORD}{_UNFINISHED}", json.loads((path / RECORD).read_text())
        unfinished.write_text(json.dumps({**record, "values": values}, allow_nan=False))
        _flush(unfinished)
        unfinished.replace(path / RECORD)
        _flush(path)


def latest(run_dir: Path) -> Path | None:
    """Return the checkpoint of the highest step in `run_dir`, or None."""
    found = _checkpoints(run_dir / "checkpoints")
    return found[max(found)] if found else None


def latest_step(run_dir: Path) -> int:
    """Return the step of the `latest` checkpoint, or 0 without one."""
    return max(_checkpoints(run_dir / "checkpoints"), default=0)


def load(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Read a checkpoint's step and the values that `write` returned. `read_tensors` reads its tensors.

    Raises:
        CheckpointError: missing, damaged, mixed with another, or not Penstock's. The message has a remedy.
    """
    try:
        record = parse_json((path / RECORD).read_bytes(), "its record", loads=json.loads)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no checkpoint of Penstock ({FORMAT}); {_REMEDY}")
        for name, checksum in _checksums(path, record["files"]).items():
            if checksum != record["files"][name]:  # torch reads the file of another checkpoint without complaint
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
    """Write tensors into a folder that all ranks see. Each rank of `group` (on CPUs) writes its part of sharded ones.

    Names are the same on every rank. `group` None: this process alone.

    Raises:
        CheckpointError: the disk refused on any rank.
    """
    with _refusals(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a single process, and about its own deprecations
        dcp.save(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=group is None)


def read_tensors(
    folder: Path,
    blank: Callable[[str, Sequence[int], torch.dtype], Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Read the tensors that `write_tensors` wrote, with any number of ranks.

    `blank` allocates a tensor for a name, shape and dtype. A sharded tensor receives this rank's part.

    Raises:
        CheckpointError: a tensor cannot be read on some rank.
    """
    try:
        entries: Mapping[str, Any] = {}
        with suppress(Exception):  # `dcp.load` fails in the same way, and tells every rank
            entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: blank(name, entry.size, entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:  # torch derives it from BaseException
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({_first(error)}); if a file is damaged, go on from another checkpoint"
        ) from error
    return tensors


@contextmanager
def _refusals(path: Path) -> Generator[None]:
    """Turn a disk's refusal into an error that says where, and what to do."""
    try:
        yield
    except (OSError, dcp.api.CheckpointException) as error:
        why = str(error) if isinstance(error, OSError) else _first(error)
        # For a full disk, torch only says "unexpected pos".
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
    """Return the error of the first rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    lines = str(cause).strip().splitlines()
    return f"rank {rank}: {type(cause).__name__}: {lines[0] if lines else ''}"


def _checkpoints(folder: Path) -> dict[int, Path]:
    """Return all checkpoints by step, the oldest first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return dict(sorted((int(match[1]), path) for match, path in named))


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 of files by name. It takes a third of hashlib's fastest, and detects accidental damage."""

    def checksum(name: str) -> int:
        crc = 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                crc = zlib.crc32(chunk, crc)
        return crc

    chosen = list(names)
    with ThreadPoolExecutor() as pool:  # zlib releases the GIL
        return dict(zip(chosen, pool.map(checksum, chosen), strict=True))


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
