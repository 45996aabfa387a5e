"""Penstock: rollout inference for reinforcement learning, many vLLM engines seen as one."""

from typing import TYPE_CHECKING, Any

from penstock.control_types import PauseMode, UpdateReport
from penstock.errors import PenstockError
from penstock.types import GenerateBatch, GenerateOutput, Sample, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from penstock.facade.vllm_like import AsyncVLLM
    from penstock.fleet.fleet import Fleet

__version__ = "0.1.0"

__all__ = [
    "AsyncVLLM",
    "Fleet",
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


def __getattr__(name: str) -> Any:
    """Import clients of a fleet at first use: engines import this package without them."""
    if name == "Fleet":
        from penstock.fleet.fleet import Fleet  # noqa: PLC0415

        return Fleet
    if name == "AsyncVLLM":
        from penstock.facade.vllm_like import AsyncVLLM  # noqa: PLC0415

        return AsyncVLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
