"""The other end of a fleet's control socket: calls to the process that holds the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

import aiohttp

from penstock.engine.transport import as_json
from penstock.errors import DeadlineError, EngineDeadError, EngineError, PenstockError, UserError
from penstock.fleet.control_wire import FleetState, Keys, error_of, keys_of, state_of
from penstock.fleet.endpoint import SILENCE_S
from penstock.fleet.sockets import present, socket_of
from penstock.parsing import parse_json, reading

ANSWER_S = 10.0
"""Deadline of what is answered at once."""
FOREVER_S = 24 * 3600.0
"""Of a call that ends with the operation it asks for; each step of that has its deadline in the other process, which is
asked meanwhile whether it lives."""


class LinkGoneError(EngineDeadError):
    """The process that holds the fleet is gone."""


class Link:
    """Calls over one socket.

    Every method raises `EngineDeadError` where the process that holds the fleet is gone, `DeadlineError` where it does
    not answer, and what the call itself raised there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def to(cls, url: str) -> Self:
        """To the fleet behind the router at `url`. Raises UserError where it has no control socket here."""
        path, known = socket_of(url), present()
        if path is None or path not in known.values():
            others = ", ".join(f"http://127.0.0.1:{port}" for port in sorted(known)) or "none"
            raise UserError(f"no fleet of yours is held at {url} by a process of this machine; known here: {others}")
        return cls(path)

    async def state(self, seen: int = -1) -> FleetState:
        """The fleet's state, as soon as it is another than that of change `seen`, or after `SILENCE_S` seconds."""
        answer = await self._request("GET", f"/fleet?seen={seen}", None, SILENCE_S + ANSWER_S)
        return state_of(answer["state"])

    async def keys(self) -> Keys:
        """The keys of the fleet's router and engines."""
        return keys_of((await self._request("GET", "/fleet/keys", None, ANSWER_S))["result"])

    async def call(self, name: str, **arguments: Any) -> tuple[Any, FleetState]:
        """Make a call (see `Endpoint`); returns its result, and the state after it."""
        answer = await self._while_alive(self._request("POST", f"/fleet/{name}", arguments, FOREVER_S))
        return answer["result"], state_of(answer["state"])

    async def stop(self) -> None:
        """End the fleet; it has ended when this returns."""
        await self._while_alive(self._request("POST", "/fleet/stop", {}, FOREVER_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _while_alive(self, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """The answer to a call, or `DeadlineError` as soon as the other process answers nothing any more."""
        asked = asyncio.create_task(call)
        silent = asyncio.create_task(self._until_silent())
        try:
            await asyncio.wait((asked, silent), return_when=asyncio.FIRST_COMPLETED)
            return await (asked if asked.done() else silent)
        finally:
            for task in (asked, silent):
                task.cancel()
            await asyncio.wait((asked, silent))

    async def _until_silent(self) -> dict[str, Any]:
        change = -1
        while True:
            try:
                change = (await self.state(change)).change
            except DeadlineError:
                raise
            except PenstockError:  # it is gone or was stopped: the call that is under way ends too, and says how
                await asyncio.Event().wait()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path), limit=0))
        data = None if body is None else as_json(path, body)
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=ANSWER_S)
        try:
            async with self._session.request(method, "http://fleet" + path, data=data, timeout=timeout) as response:
                answer: Any = parse_json(await response.read(), f"the answer of {self._path}", EngineError)
        except TimeoutError as error:
            raise DeadlineError(
                f"the process that holds the fleet did not answer within {deadline_s:g} s", seconds=deadline_s
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkGoneError(f"the process that holds the fleet is gone: nobody answers at {self._path}") from error
        with reading(f"answer of {self._path}, which is not a fleet's", EngineError):
            if "error" not in answer:
                return {"result": answer.get("result"), "state": answer["state"]}
            error = error_of(answer["error"])
        raise error
