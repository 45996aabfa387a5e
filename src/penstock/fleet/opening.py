"""A fleet about to be: await it, or enter it and have it torn down on the way out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn

from penstock.errors import StateError
from penstock.fleet.fleet import Fleet


async def reachable(fleet: Fleet) -> Fleet:
    """Open the control socket of a fleet that this process holds; where that fails, the fleet ends."""
    if fleet.endpoint is not None:
        try:
            await fleet.endpoint.open(fleet.teardown)
        except BaseException:
            await fleet.teardown()
            raise
    return fleet


_HOW = "open it by `async with Fleet.launch(...) as fleet:` or by `fleet = await Fleet.launch(...)`"


class Opening:
    """`async with opening as fleet:`, or `fleet = await opening` with a `teardown` of your own. Once only."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Fleet]]) -> None:
        self._start = start
        self._begun = False
        self._fleet: Fleet | None = None

    def __await__(self) -> Generator[Any, None, Fleet]:
        return self._open().__await__()

    async def __aenter__(self) -> Fleet:
        self._fleet = await self._open()
        return self._fleet

    async def __aexit__(self, *_: object) -> None:
        if self._fleet is not None:
            await self._fleet.teardown()

    def __getattr__(self, name: str) -> NoReturn:
        """Who forgot to open it asks it for a fleet's methods."""
        raise AttributeError(f"this fleet is not open yet, so it has no {name!r}; {_HOW}")

    def __enter__(self) -> NoReturn:
        raise StateError(f"a fleet is opened by a coroutine; {_HOW}")

    def __exit__(self, *_: object) -> None:
        """There as Python looks for it before it enters."""

    async def _open(self) -> Fleet:
        if self._begun:
            raise StateError("this fleet has been opened already; call launch or connect again for another")
        self._begun = True
        return await self._start()
