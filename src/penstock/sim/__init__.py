"""A simulated engine that speaks vLLM's HTTP with deterministic tokens."""
