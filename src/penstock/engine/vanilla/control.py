"""The control calls of one server that others started, which may run without our plugin."""

from __future__ import annotations

from typing import Any

from penstock.engine.capabilities import EngineInfo
from penstock.engine.control import ControlClient, CoreState
from penstock.engine.vanilla.history import VersionHistory
from penstock.engine.vanilla.identify import NOT_FOUND, identify
from penstock.errors import EngineHTTPError
from penstock.types import PauseMode


class VanillaControl(ControlClient):
    """`ControlClient` of a server with our plugin or without it; which of them it is, `info` finds out.

    Args:
        name, url, options: as of `ControlClient`.
        history: of the fleet that the server is in; None: one of its own, which nothing reads.
    """

    def __init__(self, name: str, url: str, *, history: VersionHistory | None = None, **options: Any) -> None:
        super().__init__(name, url, **options)
        self._history = history or VersionHistory()
        self._has_plugin = True
        self._labelled = 0
        """The version of the last native update, for vLLM 0.26, which keeps none."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Pause as `ControlClient` does; the history learns of it first."""
        self._history.note_pause()
        await super().pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)

    async def state(self) -> CoreState:
        """What the core says of itself; without our plugin only whether it is paused."""
        return await super().state() if self._has_plugin else CoreState(await self.is_paused())

    async def _info(self) -> EngineInfo:
        self._has_plugin = True
        try:
            return await super()._info()
        except EngineHTTPError as error:
            if error.status != NOT_FOUND:
                raise
        self._has_plugin = False
        return await identify(self.http, labelled=self._labelled, timeout_s=self._timeout_s)

    async def _label(self, version: int) -> None:
        self._labelled = version
        if self._has_plugin:
            await super()._label(version)
