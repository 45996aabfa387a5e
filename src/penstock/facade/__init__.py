"""A fleet with the interface of vLLM's own blocking classes, modelled on TorchRL's `AsyncVLLM` (R12)."""
