"""A setting of the C library for processes that pass large bodies on."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB that bodies have left, instead of giving pages back and faulting them in again.

    Halves the cost of a 200 KB prompt. Other C libraries have no `mallopt`, and need none of it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 64 << 20), (_M_TOP_PAD, 16 << 20), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)
