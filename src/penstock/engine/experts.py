"""Reads the experts that an engine reports for a sample (`engine.enable_return_routed_experts`)."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

from penstock.checks import reading
from penstock.errors import EngineError
from penstock.types import Sample

Made = list[tuple[Sample, int | str | None]]


def add_experts(made: Made, answer: Any, prompt_tokens: int) -> Made:
    """Return an answer's samples and stops, with the experts that it reports."""
    texts = {choice["index"]: text for choice in answer["choices"] if (text := choice.get("routed_experts"))}
    return [
        (with_experts(sample, texts[i], prompt_tokens) if i in texts else sample, stop)
        for i, (sample, stop) in enumerate(made)
    ]


def with_experts(sample: Sample, text: str, prompt_tokens: int) -> Sample:
    """Return a sample with its experts: `text` is a base64 `.npy`, a row per token.

    With too few rows, none can be matched to tokens, and all are dropped. If an entry names an expert twice, its layer
    has no router, or vLLM knows nothing of the token. The result then has -1, and the learner's own router chooses.

    Raises:
        EngineError: the text is not such an array.
    """
    import numpy as np  # noqa: PLC0415 - only needed for engines that report experts

    with reading("routed experts of the engine", EngineError):
        rows: Any = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":  # noqa: PLR2004 - tokens, layers, experts per token
        raise EngineError(f"the engine's routed experts are {rows.dtype} of shape {rows.shape}, not integers on 3 axes")
    needed = prompt_tokens + len(sample.token_ids) - 1  # the last token had no forward pass
    if len(rows) < needed:
        return sample
    rows = rows[:needed]
    twice = (np.diff(np.sort(rows, axis=-1), axis=-1) == 0).any(-1)
    return replace(
        sample, routed_experts=np.where(twice[..., None], -1, rows.astype(np.int32)) if twice.any() else rows
    )
