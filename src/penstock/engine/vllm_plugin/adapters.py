"""LoRA adapters across a sleep that drops weights.

A sleep of level 2 gives the memory of everything that was made while the model was loaded back unsaved, and vLLM (0.26
to 0.32) keeps of it only the model's buffers. The slots that hold the weights of active adapters are among the rest:
after waking they hold whatever is there, and vLLM still takes those adapters for active.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any


class AdapterWorker:
    """Mixed into vLLM's Worker."""

    def penstock_forget_adapters(self) -> None:
        """Let every adapter be copied to the device again, from host memory, when it is next asked for."""
        of_worker: Any = getattr(self.model_runner, "lora_manager", None)
        if of_worker is None:
            return
        manager = of_worker._adapter_manager  # noqa: SLF001 - vLLM has no call that only frees slots
        for adapter in [adapter for adapter in manager.lora_index_to_id if adapter is not None]:
            manager.deactivate_adapter(adapter)
        # It stands for what the device was last told of slots, which is gone too.
        manager._last_mapping = None  # noqa: SLF001
