"""Which version made tokens that carry no label."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable


class VersionHistory:
    """The weight versions that engines served between their pauses.

    Their weights change only while all of them are paused, so between two pauses there is one version.

    Attributes:
        version: gives the version in force now.
    """

    def __init__(self) -> None:
        self.version: Callable[[], int] = int
        self._paused: list[tuple[float, int]] = []
        """When an engine was paused, by the loop's clock, and the version that it served until then."""

    def note_pause(self) -> None:
        """An engine is about to be paused."""
        self._paused.append((asyncio.get_running_loop().time(), self.version()))

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
