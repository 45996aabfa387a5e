"""What a training step costs: ours beside a plain compiled script and a plain FSDP2 loop, interleaved on one GPU.

    python benchmarks/learner.py [--rounds 5] [--cases 0.6b-16k,0.6b-packed,4b-lora-16k] [--sides penstock,script,fsdp]
    python benchmarks/learner.py --quick        a model of two layers, on a CPU too

Shapes are Qwen3's, weights random, the same for every side; each side is a process of its own (`_learner_side.py`). A
step is forward, backward, clipping and AdamW. Tokens a second are by the median step, memory is the most that PyTorch
had allocated in any step after the first. A side that runs out of memory is left out of the rows. prime-rl publishes
11,896 tokens/s in 12.5 GiB for the first case on one H100, and 6,229 in 23.3 GiB for the last.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import _dummy_models
from _common import Row
from _line_process import LineProcess

SIDES = ("penstock", "script", "fsdp")
SIDE = Path(__file__).parent / "_learner_side.py"


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of batch: `sequences` of `tokens` tokens each, all weights or adapters of rank `lora`."""

    model: str
    sequences: int
    tokens: int
    lora: int
    tokens_per_second: float
    """Least that ours must reach on an H100 or H200."""
    gib: float | None
    """Most memory that ours may take."""


CASES = {
    "0.6b-16k": Case("0.6b", 1, 16_384, 0, 36_000, 13.0),
    "0.6b-packed": Case("0.6b", 16, 1024, 0, 55_000, None),
    "4b-lora-16k": Case("4b", 1, 16_384, 16, 11_000, 23.0),
}
QUICK = {
    "nano": Case("nano", 1, 64, 0, 0, None),
    "nano-packed": Case("nano", 4, 16, 0, 0, None),
    "nano-lora": Case("nano", 1, 64, 4, 0, None),
}


def measure(case: Case, sides: Sequence[str], rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Steps of each side, turn by turn; the first of each, which compiles, does not count."""
    path = _dummy_models.save(folder, case.model)
    if case.model == "nano":
        config = path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 512}))
    subprocess.run([sys.executable, str(SIDE), "save", str(path)], check=True)
    described = [str(path), str(case.sequences), str(case.tokens), str(case.lora)]
    running = {side: LineProcess([sys.executable, str(SIDE), side, *described]) for side in sides}
    steps: dict[str, list[dict[str, float]]] = defaultdict(list)
    try:
        for number in range(rounds + 2):
            for side in [name for name in sides if name in running]:
                line = running[side].ask("step")
                if not line:
                    _common.note(f"{side} ended: not measured")
                    del running[side]
                    steps.pop(side, None)
                elif number > 1:
                    steps[side].append(json.loads(line))
    finally:
        for process in running.values():
            process.close()
    return steps


def rows(name: str, case: Case, steps: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Ours by its bars, and by every peer that made its steps."""
    tokens = case.sequences * case.tokens
    speed = {side: tokens / statistics.median(s["seconds"] for s in made) for side, made in steps.items()}
    memory = {side: max(s["gib"] for s in made) for side, made in steps.items()}
    for side, rate in speed.items():
        _common.note(f"{name}: {side} {rate:,.0f} tokens/s, {memory[side]:.1f} GiB")
    if "penstock" not in speed:
        return []
    found = [_common.single(f"{name}, tokens/s", speed["penstock"], bar=case.tokens_per_second, want="at least")]
    if case.gib is not None:
        found.append(_common.single(f"{name}, GiB", memory["penstock"], bar=case.gib, want="at most"))
    for peer in speed.keys() - {"penstock"}:
        against = f"{name}, tokens/s, against {peer}"
        found.append(_common.compare(against, speed["penstock"], speed[peer], bar=1.0, want="at least"))
    return found


def main() -> int:
    """Measure and print."""
    options = _common.parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--cases", default=",".join(CASES))
    options.add_argument("--sides", default=",".join(SIDES))
    given = options.parse_args()
    cases = QUICK if given.quick else {name: CASES[name] for name in given.cases.split(",")}
    found: list[Row] = []
    steps: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a limit of time: what was measured is still printed
    with suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
        for name, case in cases.items():
            made = measure(case, given.sides.split(","), 1 if given.quick else given.rounds, Path(folder))
            steps[name] = made
            found += rows(name, case, made)
    return _common.report("learner", found, steps=steps)


if __name__ == "__main__":
    sys.exit(main())
