"""How a fleet speaks to its router: membership, gate, figures; each call with a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import orjson

from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, StateError, UserError
from penstock.router.membership import EngineEntry

_KEEPALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the router knows of one engine."""

    name: str
    url: str
    weight_version: int
    eligible: bool
    """As announced by the fleet."""
    down: bool
    """A connection was refused and no probe has succeeded since."""
    outstanding: int
    """Requests sent and not answered in full."""
    requests: int
    """Requests sent since the engine joined."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What `GET /router/engines` answers."""

    epoch: int
    """-1 before the first membership."""
    gate_closed: bool
    held: int
    """Requests waiting for the gate or for an engine."""
    sessions: int
    """Sessions that have a home."""
    requests: int
    """Requests taken in since the router started, its own admin calls not counted."""
    engines: tuple[EngineLoad, ...]


class RouterAdmin:
    """Client of one router's `/router/` endpoints.

    Every method raises `EngineDeadError` where the router is gone, `DeadlineError` after `timeout_s` seconds,
    `UserError` for a refused body (400), `StateError` for an old epoch (409), `EngineHTTPError` for any other status.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def set_engines(self, epoch: int, engines: Sequence[EngineEntry]) -> None:
        """Announce the full set; sending the same set again under the same epoch is harmless."""
        await self._call("PUT", "/router/engines", {"epoch": epoch, "engines": [asdict(e) for e in engines]})

    async def gate(self, closed: bool) -> None:  # noqa: FBT001 - the one thing that the call says
        """Close the gate (new requests wait) or open it; returns once that is in force."""
        await self._call("POST", "/router/gate", {"closed": closed})

    async def engines(self) -> RouterState:
        """The set in force, with load figures."""
        answer = await self._call("GET", "/router/engines")
        loads = tuple(EngineLoad(**load) for load in answer.pop("engines"))
        return RouterState(**answer, engines=loads)

    async def health(self) -> None:
        """Return when the router answers; needs no key."""
        await self._call("GET", "/router/health")

    async def close(self) -> None:
        """Close connections; the object can be used again."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(keepalive_timeout=_KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                headers=self._headers,
            )
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._session.request(method, self._url + path, data=data) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise DeadlineError(
                f"router {self._url} did not answer {method} {path} within {self._timeout_s:g} s",
                seconds=self._timeout_s,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDeadError(f"router {self._url} is gone ({method} {path}): {error}") from error
        return _answer(status, content, f"{method} {self._url}{path}")


def _answer(status: int, content: bytes, call: str) -> dict[str, Any]:
    try:
        answer: Any = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    if status == 200 and isinstance(answer, dict):  # noqa: PLR2004 - the HTTP status
        return answer  # pyright: ignore[reportUnknownVariableType] - a JSON object
    message = f"{call} answered {status}: {content[:500].decode(errors='replace')}"
    kind = ""
    match answer:
        case {"error": {"message": str(text), "type": str(kind)}}:
            message = f"{call} answered {status}: {text}"
        case _:
            pass
    match status:
        case 400:
            raise UserError(message)
        case 409:
            raise StateError(message)
        case _:
            raise EngineHTTPError(message, status=status, error_type=kind)
