"""Choices by hash: the same in every process, on every machine and after every restart.

Python's own hash of a string is salted anew in every process; TorchRL's balancer uses it, and two of its processes
send one prompt to two replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from penstock.router.policies.base import EngineView

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """A 64-bit integer to another that looks unrelated: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw(seed: int, counter: int, below: int) -> int:
    """The random number `counter` of the stream `seed`, in `[0, below)`: SplitMix64, which needs no state."""
    return mix64((seed * 0xD1B54A32D192ED03 + (counter + 1) * _GOLDEN) & _MASK) % below


@lru_cache(maxsize=4096)
def _hash64(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def rendezvous(key: bytes, engines: Sequence[EngineView]) -> EngineView:
    """Highest random weight hashing (Thaler and Ravishankar 1998): losing an engine moves only its own keys."""
    of_key = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return max(engines, key=lambda engine: mix64(of_key ^ _hash64(engine.name.encode())))


def breaking_tie(engines: Sequence[EngineView], session_id: str | None, placed: int) -> EngineView:
    """One of equals: by rendezvous for a session, so that a restarted router finds it again; else in rotation."""
    if len(engines) == 1:
        return engines[0]
    if session_id is not None:
        return rendezvous(session_id.encode(), engines)
    return engines[placed % len(engines)]
