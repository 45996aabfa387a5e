"""LoRA adapters that requests name, on every engine before they are needed."""

from __future__ import annotations

from typing import Any

from penstock.errors import RequestError
from penstock.fleet.fleet import Fleet
from penstock.fleet.lifecycle import State

LOAD_S = 120.0
"""Deadline of loading one adapter on one engine: a file of a few hundred megabytes from a slow disk."""
_SERVES = frozenset({State.SERVING, State.PAUSED, State.DRAINING})


class Adapters:
    """Loads each adapter once on each engine.

    Args:
        fleet: whose engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._paths: dict[str, str] = {}
        self._loaded: set[tuple[str, str]] = set()
        """Of which name at which URL."""

    async def load(self, lora: Any) -> str:
        """Have a `vllm.lora.request.LoRARequest` on every engine; returns the name that requests ask for.

        Raises:
            RequestError: it is no LoRARequest, or its name stands for another path here.
            MissingCapabilityError: an engine was launched without `enable_lora`.
            EngineHTTPError: an engine refused it.
        """
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise RequestError(f"lora_request must be vLLM's LoRARequest, got {type(lora).__name__}")
        if self._paths.setdefault(name, path) != path:
            raise RequestError(f"adapter {name!r} is {self._paths[name]}; give {path} another name")
        urls = {engine.url for engine in await self._fleet.engines(stats=False) if engine.state in _SERVES}
        if not {(name, url) for url in urls} <= self._loaded:
            await self._fleet.load_adapter(name, path, timeout_s=LOAD_S)
            self._loaded |= {(name, url) for url in urls}
        return name

    def forget(self, lora: Any) -> None:
        """An engine did not know it: it was started anew since."""
        self._loaded = {(name, url) for name, url in self._loaded if name != lora.lora_name}
