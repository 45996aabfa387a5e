"""A simulated engine that speaks vLLM's HTTP with deterministic tokens.

Use `SimServer(SimConfig())` in a test, `python -m penstock.sim` as a process, and `SimEngine` without HTTP.
"""

from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.server import SimServer
from penstock.sim.tokens import Model, expected_logprob, expected_token

__all__ = [
    "Fault",
    "FaultKind",
    "Model",
    "Phase",
    "SimConfig",
    "SimEngine",
    "SimServer",
    "expected_logprob",
    "expected_token",
]
