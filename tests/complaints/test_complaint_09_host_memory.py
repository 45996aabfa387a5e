"""Complaint 9: host memory grows with every update until the process is killed.

verl #630, #4995 and #5206.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from penstock import Fleet
from sim_fleets import SHORT

MIB = 2**20
WEIGHTS = 16 * MIB
"""Of one version."""
KEPT_VERSIONS = 6
"""At most: the one in force, the next, and slack for the allocators of three processes on a busy machine. A leak of one
copy an update would be 12."""


def host_bytes() -> int:
    """Resident bytes, shared memory included, of this process and of all that it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_info().rss for process in processes if process.is_running())


def memory_files() -> int:
    """Files of shared memory that this process has open."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum("memfd:" in str(link.readlink()) for link in links)


async def test_host_memory_does_not_grow_with_updates(fleet: Fleet) -> None:
    weights = torch.zeros(WEIGHTS // 4)

    async def updates(count: int) -> None:
        for _ in range(count):
            weights.add_(1.0)
            report = await fleet.update_weights([("w", weights)])
            assert report.bytes == WEIGHTS
            await fleet.sample([1, 2, 3], 1, SHORT)

    await updates(4)
    before, files = host_bytes(), memory_files()
    await updates(12)  # leaking one copy of each would be 192 MiB
    assert host_bytes() - before < KEPT_VERSIONS * WEIGHTS
    assert memory_files() <= files
