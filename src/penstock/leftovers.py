"""What processes leave behind when they are killed, and the kernel does not take back: names.

Shared memory has a name in /dev/shm until somebody unlinks it, a unix socket one in its folder. Python's resource
tracker unlinks what Python made, unless it is killed along; what C++ made (vLLM's tensor parallelism on CPUs, NCCL)
nobody does. So whoever ends a process group looks beforehand what it has mapped.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SCRATCH_ENV = "PENSTOCK_SCRATCH"
"""Environment variable that names a folder which belongs to a process group, and goes away with it."""
_SHARED = Path("/dev/shm")  # noqa: S108 - where names of shared memory are
_OWN = ("psm_", "sem.mp-", "vllm_dist_", "nccl-")
"""How names begin that an engine's libraries give: Python, vLLM, NCCL. What else it has mapped may be a trainer's."""
_MAPPED = re.compile(rf"(\w+):(\w+) (\d+) +{_SHARED}/")
"""Device and inode. The name beside them is not the one to unlink: glibc makes a semaphore under another, which is gone
when it has its own."""


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Named shared memory that these processes have mapped, and made or share among themselves."""
    mapped: set[tuple[int, int]] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended in between
            maps = _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())
            mapped |= {(os.makedev(int(major, 16), int(minor, 16)), int(inode)) for major, minor, inode in maps}
    found: set[Path] = set()
    for name in _SHARED.iterdir() if mapped else ():
        with suppress(FileNotFoundError):  # unlinked in between
            there = name.stat(follow_symlinks=False)
            if name.name.startswith(_OWN) and (there.st_dev, there.st_ino) in mapped:
                found.add(name)
    return found


def remove(names: Iterable[Path], scratch: Path | None) -> None:
    """Unlink what is still there of `names`, and the folder `scratch`; their processes have ended."""
    for name in names:
        name.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
