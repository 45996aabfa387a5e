"""How fast one engine of the discrete-event fleet is, and how much it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Cost of one step of continuous batching, linear in what it computes; all in seconds.

    The form is that of roofline models of decoding (Pope et al. 2022, "Efficiently Scaling Transformer Inference"):
    weights are read once a step, KV once for each token of context, and prefill is compute.
    """

    step_s: float
    """Of every step, whatever is in it."""
    sequence_s: float
    """For each sequence that gets a token in it."""
    context_s: float
    """For each token of context that those sequences attend to."""
    prefill_s: float
    """For each prompt token computed."""
    prefill_context_s: float = 0.0
    """For each pair of a prompt token computed and a token before it."""
    request_s: float = 0.0
    """For each request, once: what its HTTP and scheduling take from the engine's loop."""

    def decode(self, steps: int, batch: int, context: int) -> float:
        """Seconds of `steps` steps of `batch` sequences that hold `context` tokens at their start."""
        first = self.step_s + self.sequence_s * batch + self.context_s * context
        return steps * (first + self.context_s * batch * (steps - 1) / 2)

    def prefill(self, tokens: int, before: int) -> float:
        """Seconds that computing `tokens` prompt tokens adds to a step, `before` tokens being there already."""
        return tokens * (self.prefill_s + self.prefill_context_s * (before + tokens / 2))

    def steps_within(self, seconds: float, batch: int, context: int) -> int:
        """The fewest steps that take at least `seconds`, and at least one: where the step under way then ends."""
        first = self.step_s + self.sequence_s * batch + self.context_s * context
        slope = self.context_s * batch / 2
        if slope <= 0:
            exact = seconds / first
        else:  # k * first + slope * k * (k - 1) = seconds
            b = first - slope
            exact = (math.sqrt(b * b + 4 * slope * seconds) - b) / (2 * slope)
        return max(1, math.ceil(exact - 1e-9))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What vLLM's options of the same names set; sizes in tokens."""

    kv_tokens: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
