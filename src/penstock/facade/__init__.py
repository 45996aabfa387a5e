"""A fleet with the face of vLLM's own blocking classes, after TorchRL's `AsyncVLLM` (R12)."""
