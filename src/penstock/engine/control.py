"""Control of one engine: what it is and can do, its health, and what its core reports."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from yarl import URL

from penstock.checks import reading
from penstock.control_types import CoreState
from penstock.engine.capabilities import SAMPLED_FROM, EngineInfo
from penstock.engine.core_client import NO_CORE, CoreClient
from penstock.errors import DeadlineError, EngineError, EngineHTTPError, PenstockError
from penstock.http import HttpTransport
from penstock.rooms import plugged_in
from penstock.wire import INFO

GONE_S = 3000.0
"""Seconds after which `core_gone` repeats its call. The core keeps such a call for an hour."""


_CORE_FIELDS = [field.name for field in fields(CoreState)]


class ControlClient(CoreClient):
    """All control of one engine."""

    @cached_property
    def verbs(self) -> Any:
        """Calls that no update and no restart needs, `verbs.EngineVerbs`."""
        return plugged_in("control.verbs")(self)

    async def info(self) -> EngineInfo:
        """Return the engine's versions, sizes, state and capabilities.

        Raises:
            EngineError: the answer has another form, so this is not our engine.
            EngineHTTPError: the engine has no plugin of ours, or requires another key.
        """
        answer: Any = await self.http.get(INFO, timeout_s=self.timeout_s)
        with reading(f"answer to GET {INFO}", partial(EngineError, engine=self.name)):
            capabilities = {
                "kv_in_flight": answer.get("kv_in_flight", False),
                "sleep": answer.get("sleep", True),
                "lora": answer.get("lora", True),
                "weight_transfer": answer.get("weight_transfer"),
                "sampled_logprobs": answer["logprobs_mode"] in SAMPLED_FROM,
            }
            info = checked_info(**{**answer, "capabilities": capabilities})
            await self._connect_core(answer.get("control_port"))
        return info

    async def _connect_core(self, port: int | None) -> None:
        """Use the core at `port` from now on, for calls that must not wait for tokens."""
        url = None if port is None else str(URL(self.url).with_port(port))
        if self._core is not None and self._core.url != url:
            await self._core.close()
            self._core, self._core_answered = None, False
        if url is not None and self._core is None:
            self._core = HttpTransport(url, api_key=self._key, name=self.name)

    async def health(self, timeout_s: float) -> None:
        """Return once the engine says that it is healthy, else raise."""
        await self.http.get_text("/health", timeout_s=timeout_s)

    async def is_paused(self) -> bool:
        return bool((await self.http.get("/is_paused", timeout_s=self.timeout_s))["is_paused"])

    async def state(self) -> CoreState:
        """Ask the core between two of its steps. UnreachableError: the core is gone."""
        answer: Any = await self._ask_core("/penstock/core", {}, self.timeout_s)
        if answer is not NO_CORE:
            return CoreState(**{name: answer[name] for name in _CORE_FIELDS if name in answer})
        paused = await self.is_paused()
        info = await self.info()
        return CoreState(paused, info.weight_version, checksum=info.checksum or None)

    async def core_gone(self) -> None:
        """Return once the connection to the core breaks. Without one, never return."""
        while self._core is not None:
            try:
                await self._core.post("/penstock/core/gone", {}, timeout_s=GONE_S)
            except EngineHTTPError:
                break
            except DeadlineError:
                continue
            except PenstockError:
                return
        await asyncio.Event().wait()


_INFO = TypeAdapter(EngineInfo)


def checked_info(**values: Any) -> EngineInfo:
    """Build the description of an engine. ValueError: a value is missing, of another type, or out of range."""
    try:
        return _INFO.validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None
