"""The answers of vLLM's token endpoint as vLLM itself gives them, without our plugin."""

from __future__ import annotations

from typing import Any

from penstock.engine.partial import Partials, whole_of
from penstock.engine.vanilla import report_of
from penstock.types import Sample, SamplingParams


def samples_of(answer: dict[str, Any], params: SamplingParams) -> list[Sample]:
    """An answer's samples, in order of their index."""
    partials = Partials()
    partials.add(report_of(choice) for choice in answer["choices"])
    parts = [partials.get(i) for i in range(params.n)]
    return [whole_of(part, params, [[0, 0, len(part.ids)]]) for part in parts]
