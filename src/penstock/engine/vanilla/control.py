"""The control calls of a server that others started, which may run without our plugin, and what it served when."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from penstock.engine.capabilities import EngineInfo
from penstock.engine.control import ControlClient, CoreState
from penstock.engine.vanilla.identify import NOT_FOUND, identify
from penstock.errors import EngineHTTPError
from penstock.types import PauseMode


class VersionHistory:
    """The weight versions that engines served between their pauses.

    Their weights change only while all of them are paused, so between two pauses there is one version.

    Attributes:
        version: gives the version in force now.
    """

    def __init__(self) -> None:
        self.version: Callable[[], int] = int
        self._paused: list[tuple[float, int]] = []
        """Of each version, when an engine that served it was paused last, by the loop's clock."""

    def note_pause(self) -> None:
        """An engine is about to be paused."""
        version = self.version()
        if self._paused and self._paused[-1][1] == version:
            self._paused.pop()  # whatever was sent before that pause was sent before this one too
        self._paused.append((asyncio.get_running_loop().time(), version))

    def version_of(self, sent_at: float, *, aborted: bool) -> int | None:
        """The version of all tokens of an answer that has just come; None where that is not certain.

        Args:
            sent_at: when its request was sent, by the loop's clock.
            aborted: a pause has ended it, so it has no tokens of what came after the last one.
        """
        versions = {version for _, version in self._paused[bisect_left(self._paused, (sent_at,)) :]}
        if not (aborted and versions):
            versions.add(self.version())
        return versions.pop() if len(versions) == 1 else None


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
