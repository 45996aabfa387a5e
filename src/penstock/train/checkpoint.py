"""Checkpoints of a run: one safetensors file each, whole or absent, with everything that is no tensor as JSON in it."""

# safetensors ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.parsing import parse_json

FORMAT = "penstock-checkpoint-1"
KEEP = 2
"""Checkpoints kept: the last, and the one before it in case the last cannot be read."""

_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class LearnerState:
    """State at one step: tensors by name, and `values`, anything that JSON holds (no NaN)."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


def save(run_dir: Path, step: int, payload: LearnerState) -> Path:
    """Write `run_dir/checkpoints/step-N.safetensors` and remove all but the last `KEEP` checkpoints.

    The file appears under its name only when all of it is on the disk, so a kill at any moment leaves the checkpoint
    before it.

    Raises:
        CheckpointError: the disk refused, or a value is not JSON.
    """
    folder = run_dir / "checkpoints"
    path = folder / f"step-{step:08d}.safetensors"
    unfinished = folder / f"{path.name}.unfinished"
    try:
        values = json.dumps(payload.values, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(payload.tensors), unfinished, metadata={"format": FORMAT, "step": str(step), "values": values})
        _flush(unfinished)
        unfinished.replace(path)
        _flush(folder)
        for useless in (*_checkpoints(folder)[:-KEEP], *folder.glob("*.unfinished")):
            useless.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error}; free space or choose another run_dir"
        ) from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: a value is not JSON, or a tensor cannot be stored: {error}"
        ) from error
    return path


def latest(run_dir: Path) -> Path | None:
    """The checkpoint of the highest step in `run_dir`, or None where there is none."""
    found = _checkpoints(run_dir / "checkpoints")
    return found[-1] if found else None


def latest_step(run_dir: Path) -> int:
    """The step that `latest` is of; 0 where there is none."""
    path = latest(run_dir)
    match = _NAME.fullmatch(path.name) if path is not None else None
    return int(match[1]) if match else 0


def load(path: Path) -> tuple[int, LearnerState]:
    """Read a checkpoint: its step and what `save` was given.

    Raises:
        CheckpointError: missing, truncated, or not one of ours; says which file, and what to do.
    """
    remedy = "remove it to go on from the checkpoint before it, or start a new run without --resume"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path} is no checkpoint of Penstock ({FORMAT}); {remedy}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return int(metadata["step"]), LearnerState(
                tensors, parse_json(metadata["values"], "its record", loads=json.loads)
            )
    except FileNotFoundError:
        raise CheckpointError(f"no such checkpoint: {path}; start a new run without --resume") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is truncated or damaged ({error}); {remedy}") from error


def _checkpoints(folder: Path) -> list[Path]:
    """All of them, oldest step first."""
    named = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
