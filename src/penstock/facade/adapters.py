"""LoRA adapters that requests name, on every engine before they are needed."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.engine.concurrent import all_or_first_error
from penstock.engine.transport import HttpTransport
from penstock.errors import EngineHTTPError, RequestError
from penstock.fleet.fleet import Fleet
from penstock.fleet.lifecycle import State

LOAD_S = 120.0
"""Deadline of loading one adapter on one engine: a file of a few hundred megabytes from a slow disk."""
_SERVES = frozenset({State.SERVING, State.PAUSED, State.DRAINING})


class Adapters:
    """Loads each adapter once on each engine.

    Args:
        fleet: whose engines.
        api_key: what they ask for.
    """

    def __init__(self, fleet: Fleet, api_key: str | None) -> None:
        self._fleet = fleet
        self._api_key = api_key
        self._paths: dict[str, str] = {}
        self._loaded: set[tuple[str, str]] = set()
        """Of which name at which URL."""

    async def load(self, lora: Any) -> str:
        """Have a `vllm.lora.request.LoRARequest` on every engine; returns the name that requests ask for.

        Raises:
            RequestError: it is no LoRARequest, or its name stands for another path here.
            EngineHTTPError: an engine refused it; most likely it was launched without `enable_lora`.
        """
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise RequestError(f"lora_request must be vLLM's LoRARequest, got {type(lora).__name__}")
        if self._paths.setdefault(name, path) != path:
            raise RequestError(f"adapter {name!r} is {self._paths[name]}; give {path} another name")
        urls = [engine.url for engine in await self._fleet.engines() if engine.state in _SERVES]
        await all_or_first_error(self._load(url, name, path) for url in urls if (name, url) not in self._loaded)
        return name

    def forget(self, lora: Any) -> None:
        """An engine did not know it: it was started anew since."""
        self._loaded = {(name, url) for name, url in self._loaded if name != lora.lora_name}

    async def _load(self, url: str, name: str, path: str) -> None:
        http = HttpTransport(url, api_key=self._api_key)
        try:
            await http.call(
                "POST",
                "/v1/load_lora_adapter",
                orjson.dumps({"lora_name": name, "lora_path": path}),
                timeout_s=LOAD_S,
            )
        except EngineHTTPError as error:
            if "already been loaded" not in str(error):
                raise
        finally:
            await http.close()
        self._loaded.add((name, url))
