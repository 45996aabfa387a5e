"""How a fleet speaks to its router: membership, gate, figures; each call with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import orjson

from penstock.errors import EngineDeadError, EngineHTTPError, StateError, UserError, reading
from penstock.http import HttpTransport
from penstock.rooms import plugged_in
from penstock.router.memory import Membership

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the router knows of one engine."""

    name: str
    url: str
    weight_version: int
    eligible: bool
    """As announced by the fleet."""
    down: bool
    """The breaker is open: a connection was refused or an answer said that its core is dead, see `Backend.down`."""
    outstanding: int
    """Requests sent and not answered in full."""
    requests: int
    """Requests sent since the engine joined."""
    draining: bool = False
    """As announced by the fleet: only its own sessions still go there."""
    drained: bool = False
    """It is draining, nothing is in flight there, and no session lives there any more: it may go."""
    dp_rank: int | None = None
    """As announced by the fleet: a data-parallel rank of the server at `url`."""
    outstanding_tokens: int = 0
    """Prompt and expected tokens of the outstanding requests, as far as their headers say."""
    resident_tokens: int = 0
    """Context that lives there."""
    sessions: int = 0
    """Sessions that live there."""
    kv_usage: float = -1.0
    """Share of its KV cache in use, 0 to 1; -1: not known."""
    kv_capacity: int = 0
    """Tokens that its KV cache holds; 0: not known."""
    breaker_openings: int = 0
    """How often the breaker opened since the engine joined."""
    dead_answers: int = 0
    """Answers that said that its core is dead."""
    failure: str = ""
    """Cause that the last of them gave."""


@dataclass(frozen=True, slots=True)
class RouterState:
    """What `GET /router/engines` answers."""

    epoch: int
    """-1 before the first membership."""
    gate_closed: bool
    held: int
    """Requests waiting for the gate, for an engine or for room on one."""
    sessions: int
    """Sessions that have a home."""
    requests: int
    """Requests taken in since the router started, its own admin calls not counted."""
    engines: tuple[EngineLoad, ...]
    held_bytes: int = 0
    """Most bytes that are kept of requests that wait or are still coming in."""
    held_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many wait for what: see `penstock.router.dispatcher.Kind`."""
    moved_sessions: int = 0
    """Later turns that went to another engine than the one before."""
    placements: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests placed, by the rule that chose the engine."""
    policy: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`policy`, `prefix_length` and `overload_threshold` that are in force; empty where the router does not say."""
    workers: tuple[int, ...] = ()
    """Process ids of those that serve."""
    in_step: bool = True
    """All of them are of this epoch; one that was started again has no engines at first."""


class RouterAdmin:
    """Client of one router's `/router/` endpoints. Where several processes serve its port, each is told and asked.

    Every method raises `EngineDeadError` where the router is gone, `DeadlineError` after `timeout_s` seconds,
    `UserError` for a refused body (400), `StateError` for an old epoch (409), `EngineHTTPError` for any other status.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._transports: dict[str, HttpTransport] = {}
        self._processes: list[str] | None = None
        """URLs at which each process answers for itself; None: not known yet."""

    async def announce(self, membership: Membership) -> None:
        """Put engines, gate and policy in force on each process; the same again under the same epoch is harmless."""
        await self._all("PUT", "/router/engines", asdict(membership))

    async def choose(self, *, prompt_tokens: int = 0, prefix_hashes: str | None = None) -> str | None:
        """Place a request that is sent past the router: the engine's name; None: it would have to wait."""
        given = {} if prefix_hashes is None else {"prefix_hashes": prefix_hashes}
        url = (await self._urls())[0]  # always the same process, so that one choice follows from another
        answer = await self._call("POST", "/router/choose", {"prompt_tokens": prompt_tokens, **given}, url)
        return None if answer["engine"] is None else str(answer["engine"])

    async def finish_session(self, session_id: str | int) -> bool:
        """The session has no further turn: what it holds on its engine no longer counts. False: it was not known."""
        answers = await self._all("POST", "/router/sessions/finish", {"session_id": str(session_id)})
        with _as_a_router_answers(self._url):
            return any(answer["finished"] for answer in answers)

    async def metrics(self) -> str:
        texts = await self._each(lambda url: self._request("GET", "/router/metrics", None, url))
        with _as_a_router_answers(self._url):
            return plugged_in("workers.metrics")([t.decode() for t in texts]) if len(texts) > 1 else texts[0].decode()

    async def engines(self) -> RouterState:
        answer = await self.state()
        with _as_a_router_answers(self._url):
            loads = tuple(EngineLoad(**load) for load in answer.pop("engines"))
            answer["workers"] = tuple(answer["workers"])
            return RouterState(**answer, engines=loads)

    async def state(self) -> dict[str, Any]:
        """`engines` as the JSON that a router of one process answers."""
        states = await self._each(lambda url: self._call("GET", "/router/engines", None, url))
        with _as_a_router_answers(self._url):
            return plugged_in("workers.states")(states) if len(states) > 1 else states[0]

    async def close(self) -> None:
        """Close connections; the object can be used again."""
        for transport in self._transports.values():
            await transport.close()

    async def _urls(self) -> list[str]:
        if self._processes is None:
            ports = (await self._call("GET", "/router/health")).get("control_ports", ())
            host = self._url.rpartition(":")[0]
            self._processes = [f"{host}:{port}" for port in ports] or [self._url]
        return self._processes

    async def _all(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Make a call to each process; the answers, once all of them have answered."""
        return await self._each(lambda url: self._call(method, path, body, url))

    async def _each(self, call: Callable[[str], Awaitable[T]]) -> list[T]:
        """What the call to each process answers, or the first error once all calls have ended."""
        known = self._processes
        try:
            return await self._gather(call(url) for url in await self._urls())
        except EngineDeadError:
            self._processes = None
            if known is None or len(known) == 1:
                raise
            # Another router may have been started on the same port, with other control ports.
            return await self._gather(call(url) for url in await self._urls())

    async def _gather(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, url: str | None = None
    ) -> dict[str, Any]:
        url = url or self._url
        call = f"{method} {url}{path}"
        content = await self._request(method, path, body, url)
        answer: Any = None
        with suppress(orjson.JSONDecodeError):
            answer = orjson.loads(content)
        if not isinstance(answer, dict):
            raise EngineHTTPError(f"{call} answered 200, but not with a JSON object: {content[:200]!r}", status=200)
        return answer  # pyright: ignore[reportUnknownVariableType] - a JSON object

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, url: str) -> bytes:
        transport = self._transports.get(url)
        if transport is None:
            transport = self._transports[url] = HttpTransport(url, api_key=self._api_key, server=f"router {url}")
        data = None if body is None else orjson.dumps(body)
        try:
            return await transport.call(method, path, data, timeout_s=self._timeout_s)
        except EngineHTTPError as error:
            message = f"{method} {path} answered {error.status}: {error}"
            if error.status == 400:  # noqa: PLR2004 - the HTTP status
                raise UserError(message) from error
            if error.status == 409:  # noqa: PLR2004 - the HTTP status
                raise StateError(message) from error
            raise EngineHTTPError(message, status=error.status, error_type=error.error_type) from error


def _as_a_router_answers(url: str) -> AbstractContextManager[None]:
    """Read JSON or metrics of a router; EngineHTTPError where they do not have its form."""
    hint = "check that each of its control ports belongs to it, and restart it"

    def error(problem: str) -> EngineHTTPError:
        return EngineHTTPError(
            f"a process behind {url} answered 200, but not as a router of this version does ({problem}); {hint}",
            status=200,
        )

    return reading("answer", error)
