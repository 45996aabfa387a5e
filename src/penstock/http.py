"""HTTP with JSON bodies, a deadline on every call, and our errors instead of the library's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson

from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError, StateError, UserError
from penstock.parsing import MOST_CONTROL, read_whole, too_long
from penstock.process import raise_file_limit

IDLE_CONNECTION_S = 4.0
"""vLLM's server closes idle connections after 5 s; a pool that keeps them longer posts on dead ones."""

CONNECT_S = 10.0
"""Deadline of the TCP connection alone: on one host or one network a live server accepts at once."""


ROUTER_ERROR, HELD_TOO_LONG = "X-Penstock-Error", "held_too_long"
"""What our router says where no engine came for as long as it holds a request; none has seen the request."""


TORN = "torn"
"""The error type of an engine whose weights are half of one version and half of another."""


class UnreachableError(EngineDeadError):
    """Nobody listens there: nothing was sent."""


def as_json(what: str, body: Mapping[str, Any]) -> bytes:
    """`body` as it is sent. Raises UserError, which names `what`, where it holds something that JSON has not."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise UserError(
            f"{what} cannot be written as JSON ({error}): give Python's own numbers, strings, lists. Nothing was sent"
        ) from error


class Reply:
    """A 2xx answer while it arrives. EngineError where it, or one line of it, has more than `most` bytes."""

    def __init__(self, response: aiohttp.ClientResponse, most: int, engine: str) -> None:
        self.headers: Mapping[str, str] = response.headers
        self.content_type = response.content_type
        self._response = response
        self._most = most
        self._engine = engine

    async def read(self) -> bytes:
        """All of it."""
        return await read_whole(self._response.content.iter_any(), self._most, self._engine)

    async def lines(self) -> AsyncIterator[bytes]:
        """Its lines as they come, without their ends; a last one without an end was cut and is left out."""
        rest = bytearray()
        async for piece in self._response.content.iter_any():
            seen = len(rest)
            rest += piece
            start = 0
            while (end := rest.find(b"\n", max(start, seen))) >= 0:
                yield bytes(rest[start:end])
                start = end + 1
            del rest[:start]
            if len(rest) > self._most:
                raise too_long(self._most, self._engine)


class HttpTransport:
    """One server's base URL. The session is made at the first call, in the loop that makes it.

    Args:
        url: base URL, such as `http://127.0.0.1:8000`.
        api_key: sent as a bearer token with every call.
        name: names the server in errors; default: the URL.
        server: for servers that are no engines: what errors call it.
        most: bytes of an answer; EngineError for more.
        unix_socket: path of a socket to connect to, instead of the host in `url`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        name: str | None = None,
        server: str | None = None,
        most: int = MOST_CONTROL,
        unix_socket: Path | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = server or name or self.url
        self._unix_socket = unix_socket
        self._most = most
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._ended = False
        self.back: Callable[[], Awaitable[bool]] | None = None
        """Waits until the server, which could not be reached, has been started anew; False: it will not be.

        A router that has given up waiting for an engine is asked again too: an engine may take longer to start."""
        self.suspect: Callable[[], Awaitable[None]] | None = None
        """Called where an engine has died under a request; returns when it gets no other."""

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """POST `body` as JSON and return the decoded answer (None for an empty one).

        Raises:
            DeadlineError: no complete answer within `timeout_s` seconds.
            EngineDeadError: the connection was refused or broke.
            EngineHTTPError: an error status, with the server's message, type and status.
            EngineError: the answer is not JSON, or too long; most likely another kind of server.
            UserError: `body` cannot be written as JSON; nothing was sent.
        """
        data = b"" if body is None else as_json(f"POST {path}", body)
        answer, _ = await self.call("POST", path, data, timeout_s=timeout_s, params=params, headers=headers)
        return self.decode(answer)

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """GET and decode JSON; raises as `post` does."""
        answer, _ = await self.call("GET", path, None, timeout_s=timeout_s)
        return self.decode(answer)

    async def get_text(self, path: str, *, timeout_s: float) -> str:
        """GET plain text; raises as `post` does."""
        answer, _ = await self.call("GET", path, None, timeout_s=timeout_s)
        return answer.decode(errors="replace")

    async def call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """The raw call: body and headers of a 2xx answer; raises as `post` does."""
        async with self.stream(method, path, data, timeout_s=timeout_s, params=params, headers=headers) as reply:
            return await reply.read(), reply.headers

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        data: bytes | None,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Reply]:
        """A 2xx answer, to read while it arrives, all within `timeout_s` seconds; raises as `post` does."""
        sent = {**self._headers, **(headers or {})}
        if data is not None:
            sent["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
        with self._our_errors(method, path, timeout_s):
            async with await self._request(
                method, self.url + path, data=data, params=params, headers=sent, timeout=timeout
            ) as response:
                if response.status >= 300:  # noqa: PLR2004 - HTTP's own boundary
                    raise self.http_error(*await self._refusal(response))
                yield Reply(response, self._most, self.name)

    async def _refusal(self, response: aiohttp.ClientResponse) -> tuple[int, bytes]:
        """Status and body. Where a server would send us on, a key and a request are not meant for that address."""
        if (location := response.headers.get("Location")) and response.status < 400:  # noqa: PLR2004 - HTTP's own boundary
            said = f"redirects to {location[:200]!r}, which is not followed; give the address of the server itself"
            return response.status, said.encode()
        return response.status, await read_whole(response.content.iter_any(), MOST_CONTROL, self.name)

    async def _request(self, method: str, url: str, *, timeout: aiohttp.ClientTimeout, **options: Any) -> Any:  # noqa: ASYNC109 - aiohttp's own
        """The answer's head. A server that nobody reaches got nothing, so the same is sent when it is back."""
        async with asyncio.timeout(timeout.total):
            while True:
                try:
                    response = await self._open().request(
                        method, url, timeout=timeout, allow_redirects=False, **options
                    )
                except aiohttp.ClientConnectorError:
                    if self.back is None or not await self.back():
                        raise
                    continue
                held_too_long = response.headers.get(ROUTER_ERROR) == HELD_TOO_LONG
                if not held_too_long or self.back is None or not await self.back():
                    return response
                response.release()

    @contextmanager
    def _our_errors(self, method: str, path: str, timeout_s: float) -> Generator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DeadlineError(
                f"no answer to {method} {path} within {timeout_s:g} s", seconds=timeout_s, engine=self.name
            ) from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno  # negative: of getaddrinfo, which has its own names
            why = os.strerror(number) if number is not None and number > 0 else error.strerror
            raise UnreachableError(
                f"{method} {path}: nothing answers at {self.url} ({why})", engine=self.name
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise EngineDeadError(f"{method} {path}: {detail}", engine=self.name) from error

    def decode(self, answer: bytes) -> Any:
        """JSON, or None for an empty body; raises EngineError for anything else."""
        try:
            return orjson.loads(answer) if answer else None
        except orjson.JSONDecodeError as error:
            raise EngineError(f"answered {answer[:80]!r}, which is not JSON", engine=self.name) from error

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def end(self) -> None:
        """Close the connections for good: a later call, such as one that is made again, raises StateError."""
        self._ended = True
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._ended:
            raise StateError(f"the connections to {self.name} were closed for good; make another client")
        if self._session is None or self._session.closed:
            raise_file_limit()
            # No limit: the caller bounds what is in flight, and a queue hidden here would look like engine latency.
            connector = (
                aiohttp.UnixConnector(str(self._unix_socket), limit=0)
                if self._unix_socket is not None
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
            )
            self._session = aiohttp.ClientSession(connector=connector, loop=asyncio.get_running_loop())
        return self._session

    def http_error(self, status: int, answer: bytes) -> EngineHTTPError:
        """What an error status and its body say."""
        message, kind = answer.decode(errors="replace").strip() or f"HTTP {status}", ""
        try:
            body: Any = orjson.loads(answer)
        except orjson.JSONDecodeError:
            body = None
        if isinstance(body, dict):
            fields = cast("dict[str, Any]", body)
            error: Any = fields.get("error", fields)
            if isinstance(error, dict):
                described = cast("dict[str, Any]", error)
                message = str(described.get("message") or described.get("detail") or message)
                kind = str(described.get("type") or "")
            elif isinstance(error, str):
                message, kind = error, TORN if fields.get("torn") is True else kind
        return EngineHTTPError(message, status=status, error_type=kind, engine=self.name)
