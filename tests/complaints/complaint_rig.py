"""What complaints about a fleet have in common."""

from __future__ import annotations

from penstock import SamplingParams

LONG = SamplingParams(max_tokens=300, detokenize=False)
SHORT = SamplingParams(max_tokens=8, detokenize=False)
