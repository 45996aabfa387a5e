"""The other end of a fleet's control socket: calls to the process that holds the fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson

from penstock.errors import DeadlineError, EngineDeadError, EngineError, UserError
from penstock.fleet.control_wire import FleetState, error_of, state_of
from penstock.fleet.endpoint import SILENCE_S
from penstock.fleet.sockets import present, socket_of

ANSWER_S = 10.0
"""Deadline of what is answered at once."""
FOREVER_S = 24 * 3600.0
"""Of a call that ends with the operation it asks for; each step of that has its deadline in the other process."""


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
        path = socket_of(url)
        if path is None or not path.exists():
            others = ", ".join(f"http://127.0.0.1:{port}" for port in sorted(present())) or "none"
            raise UserError(
                f"no fleet of yours is held at {url} by `penstock serve` or a detached process of this machine; "
                f"known here: {others}"
            )
        return cls(path)

    async def state(self, seen: int = -1) -> FleetState:
        """The fleet's state, as soon as it is another than that of change `seen`, or after `SILENCE_S` seconds."""
        answer = await self._request("GET", f"/fleet?seen={seen}", None, SILENCE_S + ANSWER_S)
        return state_of(answer["state"])

    async def call(self, name: str, **arguments: Any) -> tuple[Any, FleetState]:
        """Make a call (see `Endpoint`); returns its result, and the state after it."""
        answer = await self._request("POST", f"/fleet/{name}", arguments, FOREVER_S)
        return answer["result"], state_of(answer["state"])

    async def stop(self) -> None:
        """End the fleet; it has ended when this returns."""
        await self._request("POST", "/fleet/stop", {}, FOREVER_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path), limit=0))
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=ANSWER_S)
        try:
            async with self._session.request(method, "http://fleet" + path, data=data, timeout=timeout) as response:
                answer: Any = orjson.loads(await response.read())
        except TimeoutError as error:
            raise DeadlineError(
                f"the process that holds the fleet did not answer within {deadline_s:g} s", seconds=deadline_s
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkGoneError(f"the process that holds the fleet is gone ({self._path}): {error}") from error
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self._path} answers, but not as a fleet") from error
        if "error" in answer:
            raise error_of(answer["error"])
        return answer
