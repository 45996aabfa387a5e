"""Control calls for LoRA adapters, to one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.control_types import KV, EngineUpdate
from penstock.engine.control import BAD_REQUEST, ControlClient
from penstock.errors import EngineHTTPError, WeightsError
from penstock.wire import ADAPTERS

IN_FLIGHT = 409
"""HTTP status with which an engine refuses to unload an adapter in use."""


class AdapterRefusedError(EngineHTTPError, WeightsError):
    """An adapter does not fit the engine's model, or is unreadable."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The state of a LoRA adapter on one engine."""

    version: int | None
    """The adapter's own version; None if the fleet did not load it."""
    in_flight: int
    """Number of its requests in flight."""
    idle_s: float
    """Seconds since its last request came."""


class AdapterCalls:
    """`ControlClient.adapters` for an engine with our plugin."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    async def read(self, name: str, source: Mapping[str, Any], *, timeout_s: float) -> None:
        """Let the engine read an adapter while it generates, so that `load` is quick."""
        await self._control.at_core(f"{ADAPTERS}/read", {"name": name, "source": dict(source)}, timeout_s)

    async def load(
        self, name: str, version: int, source: Mapping[str, Any], *, timeout_s: float, kv: KV = "recompute"
    ) -> EngineUpdate:
        """Put a version of an adapter in force between two steps.

        `source`: see `weights.adapter_files.AdapterFiles.source`. AdapterRefusedError: unfit; the old one stays.
        """
        body = {"name": name, "version": version, "source": dict(source), "kv": kv}
        try:
            return self._control.update_of(await self._control.post(f"{ADAPTERS}/load", body, timeout_s=timeout_s))
        except EngineHTTPError as error:
            if error.status == BAD_REQUEST:
                raise AdapterRefusedError(str(error), status=error.status, engine=self._control.name) from error
            raise

    async def unload(self, name: str) -> None:
        """Forget an adapter. EngineHTTPError with status 409: it has requests in flight."""
        await self._control.post(f"{ADAPTERS}/unload", {"name": name})

    async def served(self) -> dict[str, AdapterLoad]:
        """Return the adapters that requests can name."""
        answer: Any = await self._control.http.get(ADAPTERS, timeout_s=self._control.timeout_s)
        return {str(name): AdapterLoad(**given) for name, given in answer.items()}

    async def pause(self, name: str) -> None:
        """Stop an adapter's requests after a token. These and new requests wait."""
        await self._control.at_core(f"{ADAPTERS}/pause", {"name": name})

    async def resume(self, name: str) -> None:
        """Let an adapter's requests continue. Harmless if it is not paused."""
        await self._control.at_core(f"{ADAPTERS}/resume", {"name": name})
