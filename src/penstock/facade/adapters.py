"""LoRA adapters that requests name, on every engine before they are needed."""

from __future__ import annotations

import itertools
from typing import Any

from penstock.errors import RequestError
from penstock.fleet.adapters import Adapter
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import State

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
        self._saved: dict[str, tuple[Adapter, str]] = {}
        """By the caller's name: its files as they were saved last, and the name that engines have for those."""
        self._numbers = itertools.count(2)
        self._loaded: set[tuple[str, str]] = set()
        """Of which name at which URL."""

    async def load(self, lora: Any) -> str:
        """Have a `vllm.lora.request.LoRARequest` on every engine; returns the name that requests ask for.

        One that was saved again gets a new name there: engines keep weights and KV by name, so requests in flight go on
        with the old ones, and no new one meets their KV.

        Raises:
            RequestError: it is no LoRARequest, or its name stands for another path here.
            MissingCapabilityError: an engine was launched without `enable_lora`.
            EngineHTTPError: an engine refused it.
        """
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise RequestError(f"lora_request must be vLLM's LoRARequest, got {type(lora).__name__}")
        now = Adapter.at(path)
        saved, served = self._saved.setdefault(name, (now, name))
        if saved.path != path:
            raise RequestError(f"adapter {name!r} is {saved.path}; give {path} another name")
        if saved != now:
            served = f"{name}.{next(self._numbers)}"
            self._saved[name] = now, served
        urls = {engine.url for engine in await self._fleet.engines(stats=False) if engine.state in _SERVES}
        if not {(served, url) for url in urls} <= self._loaded:
            await self._fleet.load_adapter(served, path, timeout_s=LOAD_S)
            self._loaded |= {(served, url) for url in urls}
        return served

    def forget(self, served: str) -> None:
        """An engine did not know it: it was started anew since."""
        self._loaded = {(name, url) for name, url in self._loaded if name != served}
