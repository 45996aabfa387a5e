"""The kernel of the checksums, by Triton's interpreter, which needs no GPU: what torch's operations find, it finds.

`tests/gpu/test_gpu_sums.py` holds it compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
from penstock.weights import checksum, sum_kernel
from sum_samples import samples

def found(tensors):
    sums = checksum.DeviceSums(finite=True)
    sums.add(*tensors)
    return sums.found()

by_torch = found(samples())
assert 0 < sum(finite for _, finite in by_torch) < len(by_torch)
checksum._kernel = lambda device: sum_kernel.launch
sum_kernel.PROGRAMS = 3  # each is interpreted
by_kernel = found(samples())
assert by_kernel == by_torch, [pair for pair in zip(samples(), by_kernel, by_torch) if pair[1] != pair[2]]
print(len(by_kernel), "alike")
"""


def test_one_kernel_finds_what_torchs_operations_find() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("alike\n"), done.stderr[-3000:]
