"""A made-up run with figures like those of the demo, for tests of what is drawn and printed from a run."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from penstock.control_types import EngineUpdate, UpdateReport
from penstock.observe.summary import Summary


def sample_rows(steps: int = 80, seed: int = 0) -> list[dict[str, float]]:
    """Rows of metrics.jsonl for a run that learns."""
    rng = random.Random(seed)
    rows: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        training, waiting, update = rng.gauss(1.05, 0.05), abs(rng.gauss(0.18, 0.06)), rng.gauss(0.06, 0.006)
        # Told of in the row after, as is all that is done when a step has been recorded.
        later = {"seconds/evaluation": 0.8, "seconds/checkpoint": 0.3} if step % 20 == 1 and step > 1 else {}
        seconds = training + waiting + update + sum(later.values()) + 0.01
        tokens = rng.randint(5600, 6200)
        fresh = int(tokens * rng.uniform(0.15, 0.3))
        rows.append(
            {
                "step": step,
                "version": step,
                "samples": 512,
                "tokens": tokens,
                "reward_mean": 0.3 + 0.3 * (1 - math.exp(-step / 25)) + rng.gauss(0, 0.02),
                "staleness/0": fresh,
                "staleness/1": int((tokens - fresh) * 0.8),
                "staleness/2": tokens - fresh - int((tokens - fresh) * 0.8),
                "staleness_mean": rng.uniform(0.8, 1.0),
                "staleness_max": 2,
                "multi_version_share": rng.uniform(0.05, 0.15),
                "logprob_difference": 10 ** rng.uniform(-5.5, -4.6),
                "generated_tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "wasted_tokens": 0,
                "update/preempted": 300,
                "update/bubble": abs(rng.gauss(0.045, 0.004)) + (0.02 if step == 1 else 0),
                "seconds/training": training,
                "seconds/waiting": waiting,
                "seconds/update": update,
                **later,
                "seconds/step": seconds,
            }
        )
    return rows


def sample_summary(rows: list[dict[str, float]], evaluations: Mapping[int, float] | None = None) -> Summary:
    """The summary of `sample_rows`."""
    return Summary.of(
        rows,
        name="demo",
        seed=0,
        resumed_at=(),
        evaluations={0: 0.441, len(rows): 0.713} if evaluations is None else evaluations,
        wasted_tokens=0,
        unconsumed_tokens=4120,
        seconds={
            "waiting": sum(row["seconds/waiting"] for row in rows),
            "training": sum(row["seconds/training"] for row in rows),
            "update": sum(row["seconds/update"] for row in rows),
            "evaluation": 6.2,
            "checkpoint": 1.4,
            "total": sum(row["seconds/step"] for row in rows) + 32.0,
        },
    )


def sample_report(version: int, bubble: float = 0.045, failures: Mapping[str, str] | None = None) -> UpdateReport:
    """An update that two engines made."""
    seconds = {"prepare": 0.01, "pause": 0.02, "load": 0.02, "resume": 0.005, "bubble": bubble}
    return UpdateReport(
        version=version,
        bytes=3_200_000,
        seconds={"publish": 0.01, "prepare": 0.01, "gate": bubble, "total": bubble + 0.02},
        engines=tuple(EngineUpdate(f"engine-{i}", seconds, 17, "ab") for i in range(2)),
        failures=failures or {},
    )
