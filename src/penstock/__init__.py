"""Penstock: rollout inference for reinforcement learning, many vLLM engines seen as one."""

from penstock.errors import PenstockError
from penstock.types import (
    GenerateBatch,
    GenerateOutput,
    PauseMode,
    Sample,
    SamplingParams,
    UpdateReport,
    VersionSpan,
)

__version__ = "0.1.0"

__all__ = [
    "GenerateBatch",
    "GenerateOutput",
    "PauseMode",
    "PenstockError",
    "Sample",
    "SamplingParams",
    "UpdateReport",
    "VersionSpan",
    "__version__",
]
