"""What processes leave behind when they are killed, and the kernel does not take back: names.

Shared memory has a name in /dev/shm until somebody unlinks it, a unix socket one in its folder. Python's resource
tracker unlinks what Python made, unless it is killed along; what C++ made (vLLM's tensor parallelism on CPUs, NCCL)
nobody does. So whoever ends a process group looks beforehand what it has mapped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SCRATCH_ENV = "PENSTOCK_SCRATCH"
"""Environment variable that names a folder which belongs to a process group, and goes away with it."""
_OWN = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-|vllm_dist_|nccl-).*)$", re.MULTILINE)
"""Names that an engine's libraries give: Python, vLLM, NCCL. What else it has mapped may be a trainer's."""
_GONE = " (deleted)"


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Named shared memory that these processes have mapped, and made or share among themselves."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended in between
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in _OWN.findall(maps) if not name.endswith(_GONE)}
    return found


def remove(names: Iterable[Path], scratch: Path | None) -> None:
    """Unlink what is still there of `names`, and the folder `scratch`; their processes have ended."""
    for name in names:
        name.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
