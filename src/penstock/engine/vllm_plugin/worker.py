"""What the control plane asks of a worker beyond vLLM's own methods; mixed into its Worker by vLLM."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportUninitializedInstanceVariable=false

from __future__ import annotations

from typing import Any

from penstock.engine.vllm_plugin.checksum import weights_checksum
from penstock.engine.vllm_plugin.reload import load
from penstock.engine.vllm_plugin.sources import Source, make_source
from penstock.errors import WeightsError
from penstock.weights.manifest import WeightManifest


class WorkerExtension:
    """Methods for `collective_rpc`; `self` is vLLM's Worker, so what is kept here has names of its own."""

    def penstock_source(self, transport: str) -> Source:
        """The source of a transport; one for the worker's whole life."""
        sources: dict[str, Source] = self.__dict__.setdefault("_penstock_sources", {})
        if transport not in sources:
            sources[transport] = make_source(transport, self)
        return sources[transport]

    def penstock_prepare(self, manifest: dict[str, Any]) -> str | None:
        """Let the transport do what it can while the engine generates (see `Source.prepare`); why it cannot, if so.

        Returned, since what a worker raises arrives elsewhere as an Exception of no type.
        """
        try:
            version = WeightManifest.from_json(manifest)
            self.penstock_source(version.transport).prepare(version)
        except WeightsError as error:
            return str(error)
        return None

    def penstock_load(self, manifest: dict[str, Any]) -> str:
        """Load one version in place; the engine must be paused. Returns `penstock_checksum`."""
        version = WeightManifest.from_json(manifest)
        load(self, version, self.penstock_source(version.transport))
        return self.penstock_checksum()

    def penstock_checksum(self) -> str:
        """Checksum of the weights in force on this worker."""
        return weights_checksum(self.model_runner.get_model())
