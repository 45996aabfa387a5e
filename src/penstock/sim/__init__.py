"""A simulated engine that speaks vLLM's HTTP with deterministic tokens.

`SimServer(SimConfig())` in a test, `python -m penstock.sim` as a process, `SimEngine` without HTTP under virtual time
(`run_virtual`); `verify` checks every token of an answer.
"""

from penstock.sim.clock import DeadlockError, VirtualClock, run_virtual
from penstock.sim.config import Fault, FaultKind, Phase, SimConfig
from penstock.sim.engine import SimEngine
from penstock.sim.server import SimServer
from penstock.sim.tokens import Model, expected_logprob, expected_token, verify

__all__ = [
    "DeadlockError",
    "Fault",
    "FaultKind",
    "Model",
    "Phase",
    "SimConfig",
    "SimEngine",
    "SimServer",
    "VirtualClock",
    "expected_logprob",
    "expected_token",
    "run_virtual",
    "verify",
]
