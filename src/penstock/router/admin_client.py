"""The fleet's client of its router's control ports; each call has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from penstock.checks import reading
from penstock.errors import EngineDeadError, EngineError, EngineHTTPError, StateError, UserError
from penstock.http import HttpTransport
from penstock.router.membership import Membership
from penstock.router_settings import LAST_PORT


class Announcer(Protocol):
    """The control side of a router as updates and deaths need it: `RouterClient`, `running_router.VllmRouterAdmin`."""

    async def announce(self, membership: Membership) -> None: ...
    async def epochs(self) -> list[int]: ...


class RouterClient:
    """Client of one router: it calls the control port of each of its processes, which the router's URL tells.

    Every method raises `EngineDeadError` where the router is gone, `DeadlineError` after `timeout_s` seconds,
    `UserError` for a refused body (400), `StateError` for an old epoch (409), `EngineHTTPError` for any other status.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._transports: dict[str, HttpTransport] = {}
        self._processes: list[str] | None = None
        """One URL for each router process, of its control port; None: not known yet."""

    async def announce(self, membership: Membership) -> None:
        """Put engines, gate and policy in force on each process; repeating is harmless."""
        await self._all("PUT", "/router/engines", asdict(membership))

    async def epochs(self) -> list[int]:
        """Return the epoch in force at each process; -1: none yet."""
        answers = await self._all("GET", "/router/engines")
        with reading("answer", self._other_form):
            return [int(answer["epoch"]) for answer in answers]

    def forget(self) -> None:
        """Ask for the processes' ports again before the next call, after a restart."""
        self._processes = None

    async def close(self) -> None:
        """Close the connections; a later call opens them again."""
        for transport in self._transports.values():
            await transport.close()

    def _other_form(self, problem: str) -> EngineHTTPError:
        what = f"a process behind {self._url} answered 200, but not as a router of this version does ({problem})"
        hint = "check that each of its control ports belongs to it, and restart it"
        return EngineHTTPError(f"{what}; {hint}", status=200)

    async def _urls(self) -> list[str]:
        if self._processes is None:
            answer = await self._call("GET", "/router/health")
            with reading("control_ports", self._other_form):
                ports = [int(port) for port in answer["control_ports"]]
            if not ports or not all(0 < port <= LAST_PORT for port in ports):
                raise self._other_form(f"control_ports: {ports}")
            parts = urlsplit(self._url)
            host = parts.netloc if parts.port is None else parts.netloc.rpartition(":")[0]
            self._processes = [f"{parts.scheme}://{host}:{port}" for port in ports]
            gone = [self._transports.pop(url) for url in self._transports.keys() - {self._url, *self._processes}]
            for transport in gone:
                await transport.close()
        return self._processes

    async def _all(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Call each process, or the first `most`; return all answers, or raise the first error at the end."""
        known = self._processes
        try:
            return await self._each(method, path, body, most)
        except EngineError as error:  # another program may have answered: it must not get the key again
            self.forget()
            if known is None or not isinstance(error, EngineDeadError):
                raise
            # Another router may have been started on the same port, with other control ports.
            return await self._each(method, path, body, most)

    async def _each(
        self, method: str, path: str, body: Mapping[str, Any] | None, most: int | None
    ) -> list[dict[str, Any]]:
        calls = [self._call(method, path, body, url) for url in (await self._urls())[:most]]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, url: str | None = None
    ) -> dict[str, Any]:
        url = url or self._url
        transport = self._transports.get(url)
        if transport is None:
            # Health needs no key, and another program may have the router's port by now.
            key = None if url == self._url else self._api_key
            transport = self._transports[url] = HttpTransport(url, api_key=key, server=f"router {url}")
        data = None if body is None else orjson.dumps(body)
        try:
            content = await transport.call(method, path, data, timeout_s=self._timeout_s)
        except EngineHTTPError as error:
            message = f"{method} {path} answered {error.status}: {error}"
            if error.status == 400:  # noqa: PLR2004 - the HTTP status
                raise UserError(message) from error
            if error.status == 409:  # noqa: PLR2004 - the HTTP status
                raise StateError(message) from error
            raise EngineHTTPError(message, status=error.status, error_type=error.error_type) from error
        with reading("answer", self._other_form):
            return dict(orjson.loads(content))
