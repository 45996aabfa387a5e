"""What a sleep that drops weights leaves behind on a worker, put right when it wakes.

A sleep of level 2 gives back, unsaved, the memory of everything that was made while the model was loaded, and vLLM
(0.26 to 0.32) restores of it only the model's buffers. The rest holds whatever is there after waking.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch


class DroppedWeights:
    """Mixed into vLLM's Worker."""

    def penstock_weights_dropped(self) -> None:
        """Make of what is there a model without weights; called when their memory is back, before any are loaded."""
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()  # padding, which no update brings
        self._forget_adapters()

    def _forget_adapters(self) -> None:
        """Let every LoRA adapter be copied to the device again, from host memory, when it is next asked for.

        VLLM still takes those in the device's slots for active.
        """
        of_worker: Any = getattr(self.model_runner, "lora_manager", None)
        if of_worker is None:
            return
        manager = of_worker._adapter_manager  # noqa: SLF001 - vLLM has no call that only frees slots
        for adapter in [adapter for adapter in manager.lora_index_to_id if adapter is not None]:
            manager.deactivate_adapter(adapter)
        # It stands for what the device was last told of slots, which is gone too.
        manager._last_mapping = None  # noqa: SLF001
