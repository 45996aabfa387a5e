"""What the control plane asks of a worker beyond vLLM's own methods; mixed into its Worker by vLLM."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from penstock.engine.vllm_plugin.checksum import weights_checksum


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's Worker."""

    def penstock_load(self, manifest: dict[str, Any]) -> str:
        """Load one version in place; the engine must be paused. Returns `penstock_checksum`."""
        self.start_weight_update()
        self.update_weights({"manifest": manifest})
        self.finish_weight_update()
        return self.penstock_checksum()

    def penstock_checksum(self) -> str:
        """Checksum of the weights in force on this worker."""
        return weights_checksum(self.model_runner.get_model())
