"""The GPUs of this machine, and which of them an engine gets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.command import resolve_profile
from penstock.errors import ConfigError
from penstock.settings import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs for processes started here, as named in `CUDA_VISIBLE_DEVICES`.

    Empty if they cannot be listed (WSL has no device files): engines then find theirs by themselves.
    """
    given = os.environ.get(VISIBLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def usable_gpus(config: EngineConfig) -> tuple[str, ...]:
    """Return the GPUs of this machine that such engines may use; empty: they use none."""
    return visible_gpus() if resolve_profile(config) == "gpu" else ()


def assign(config: EngineConfig, engines: int, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each engine's GPUs, from the last, to leave a trainer the first ones."""
    taken: list[tuple[str, ...]] = []
    for _ in range(engines):
        taken.append(place(config, gpus, taken))
    return taken[::-1]


def place(config: EngineConfig, gpus: Sequence[str], taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return one more engine's GPUs: those with the fewest engines, the last first.

    Raises:
        ConfigError: there is no room, even with the sharing that `gpu_memory_utilization` allows.
    """
    if not gpus:
        return ()
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    used = Counter(name for names in taken for name in names)
    room = [name for name in reversed(gpus) if (used[name] + 1) * config.gpu_memory_utilization <= 1]
    chosen = sorted(room, key=lambda name: used[name])[:ranks]
    if len(chosen) < ranks:
        raise ConfigError(
            f"an engine needs {ranks} GPUs and {len(room)} have room ({','.join(gpus)}, {sum(used.values())} taken): "
            f"ask for fewer engines, or lower gpu_memory_utilization ({config.gpu_memory_utilization:g}) to share them"
        )
    return tuple(name for name in gpus if name in chosen)
