"""Keyword options and addresses given to `launch` and `connect`, to the validated sections that they belong to."""

from __future__ import annotations

import difflib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError
from penstock.settings import EngineConfig, Section, validate

S = TypeVar("S", bound=Section)


def section(kind: type[S], given: S | None, options: Mapping[str, Any]) -> S:
    """A section from what was given whole, with the options that are fields of it put over it.

    Raises:
        ConfigError: a value of the wrong type or out of range, or a required one missing.
    """
    if not isinstance(given, kind | None):
        raise ConfigError(f"give a {kind.__name__}, not {given!r}; or its fields as options of their own")
    base = given.model_dump() if given is not None else {}
    return validate(kind, base | {name: value for name, value in options.items() if name in kind.model_fields})


def refuse_unknown(options: Mapping[str, Any], *kinds: type[Section]) -> None:
    """Raise ConfigError for the first option that is a field of no section, with the nearest one that is."""
    known = sorted({name for kind in kinds for name in kind.model_fields})
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")


def check_key(api_key: object) -> None:
    """Raise ConfigError for an API key that no request can carry, without saying what it is."""
    if api_key is not None and not isinstance(api_key, str):
        raise ConfigError(f"api_key must be a string, not of type {type(api_key).__name__}")
    if api_key and any(ord(letter) < ord(" ") or letter == "\x7f" for letter in api_key):
        raise ConfigError("api_key has a line break or another control character in it; strip what was read of a file")


def made(log_dir: Path) -> Path:
    """`fleet.log_dir`, which need not be there yet. Raises ConfigError where it cannot be made."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"fleet.log_dir {log_dir} cannot be made: {error.strerror}; choose another folder") from error
    return log_dir


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that a process started from here may use, by their names in `CUDA_VISIBLE_DEVICES`.

    Empty where they cannot be listed (WSL has no device files): engines then find theirs by themselves.
    """
    given = os.environ.get(VISIBLE)
    if given is not None:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


def assign(config: EngineConfig, engines: int, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """GPUs of each engine, from the last backwards, so that the first ones are left to a trainer.

    Each has its own where there are enough; else they share, as far as `gpu_memory_utilization` leaves room.

    Raises:
        ConfigError: one engine needs more GPUs than there are, or sharing would need more memory than they have.
    """
    if not gpus:
        return [()] * engines
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    needed = engines * ranks
    sharing = math.ceil(needed / len(gpus))
    if ranks > len(gpus) or sharing * config.gpu_memory_utilization > 1:
        share = f", or gpu_memory_utilization of at most {1 / sharing:.2g} to share them" if ranks <= len(gpus) else ""
        raise ConfigError(
            f"{needed} GPUs are needed (engines: {engines}, GPUs of each: {ranks}) and there are {len(gpus)} "
            f"({','.join(gpus)}): ask for fewer{share}"
        )
    first = len(gpus) - needed
    places = [range(first + engine * ranks, first + (engine + 1) * ranks) for engine in range(engines)]
    return [tuple(gpus[place % len(gpus)] for place in of_engine) for of_engine in places]


def place(config: EngineConfig, gpus: Sequence[str], taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """GPUs of one engine more: those with the fewest engines on them, the last ones first.

    Args:
        config: of each engine.
        gpus: that there are.
        taken: those of each engine that is there.

    Raises:
        ConfigError: there is no room, as far as `gpu_memory_utilization` lets engines share.
    """
    if not gpus:
        return ()
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    used = Counter(name for names in taken for name in names)
    room = [name for name in reversed(gpus) if (used[name] + 1) * config.gpu_memory_utilization <= 1]
    chosen = sorted(room, key=lambda name: used[name])[:ranks]
    if len(chosen) < ranks:
        raise ConfigError(
            f"one engine more needs {ranks} GPUs and {len(room)} have room ({','.join(gpus)} with {sum(used.values())} "
            "taken): remove or replace an engine, or lower gpu_memory_utilization"
        )
    return tuple(name for name in gpus if name in chosen)
