"""An HTTP client for JSON bodies, with a deadline for every call, bounded answers, and Penstock's errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson

from penstock.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineHTTPError,
    StateError,
    UserError,
)
from penstock.process import raise_file_limit

IDLE_CONNECTION_S = 4.0
"""Seconds that an idle connection is kept; vLLM's server closes it after 5 s, and posts on dead ones fail."""

CONNECT_S = 10.0
"""Deadline of the TCP connection alone; a live server on the host or network accepts at once."""

MOST_CONTROL, MOST_DATA = 64 << 20, 1 << 30
"""Largest answer in bytes to a control call, and with generated tokens."""

ROUTER_ERROR, HELD_TOO_LONG = "X-Penstock-Error", "held_too_long"
"""Header and value of our router's 503 if no engine came in time; no engine has seen the request."""

TORN = "torn"
"""Error type of an engine whose weights mix two versions."""

REDIRECT, ERROR = 300, 400
"""First status of a redirect, and of an error."""


class UnreachableError(EngineDeadError):
    """No server listens at the address; the request was not sent."""


class ConnectTimeoutError(DeadlineError):
    """No connection opened in time, perhaps since a firewall drops packets; the request was not sent."""


def as_json(what: str, body: Mapping[str, Any]) -> bytes:
    """Encode `body` as JSON. UserError, which names `what`: JSON cannot hold a value."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise UserError(
            f"{what} cannot be written as JSON ({error}): give Python's own numbers, strings, lists. Nothing was sent"
        ) from error


class Reply:
    """A 2xx answer while it arrives. EngineError: the answer, or one line, is longer than the client's `most`."""

    def __init__(self, response: aiohttp.ClientResponse, too_long: Callable[[], EngineError], most: int) -> None:
        self.headers: Mapping[str, str] = response.headers
        self.content_type = response.content_type
        self._response = response
        self._too_long = too_long
        self._most = most

    async def read(self) -> bytes:
        body = bytearray()
        async for piece in self._response.content.iter_any():
            body += piece
            if len(body) > self._most:
                raise self._too_long()
        return bytes(body)

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield lines as they come, without line ends; drop a last line that was cut."""
        begun = bytearray()
        async for piece in self._response.content.iter_any():
            *ends, rest = piece.split(b"\n")
            for end in ends:
                yield bytes(begun + end)
                begun.clear()
            begun += rest
            if len(begun) > self._most:
                raise self._too_long()


class HttpTransport:
    """Client of one server. The first call opens the connections, in its event loop.

    Args:
        url: base URL, such as `http://127.0.0.1:8000`.
        api_key: sent as a bearer token with every call.
        name: names the engine in errors; default: the URL.
        server: for servers that are no engines: the name in errors, instead of "engine NAME".
        most: largest answer in bytes; a longer one is an EngineError.
        unix_socket: path of a socket to connect to, instead of the host in `url`.

    Attributes:
        back: waits until an unreachable server is back, and the request is sent again; False: it will not come back.
            The same happens when a router gave up waiting for an engine, since engines start slowly.
        suspect: called after an engine has died under a request; returns when no request goes there any more.
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
        if api_key and not api_key.isprintable():
            raise ConfigError("the API key holds a character that no header can carry; is a line end in its file?")
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.back: Callable[[], Awaitable[bool]] | None = None
        self.suspect: Callable[[], Awaitable[None]] | None = None
        self._engine = self.name if server is None else None
        self._server = server
        self._most = most
        self._unix_socket = unix_socket
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._ended = False

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """POST `body` as JSON and return the decoded answer (None for an empty one).

        Raises:
            DeadlineError: no complete answer within `timeout_s` seconds.
            EngineDeadError: the connection was refused or broke.
            EngineHTTPError: an error status, with the server's message, type and status.
            EngineError: the answer is not JSON, or too long; the server is most likely of another kind.
            UserError: `body` cannot be written as JSON; no request was sent.
        """
        data = b"" if body is None else as_json(f"POST {path}", body)
        return self.decode(await self.call("POST", path, data, timeout_s=timeout_s, headers=headers))

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """GET and decode JSON; raises as `post`."""
        return self.decode(await self.call("GET", path, None, timeout_s=timeout_s))

    async def call(
        self, method: str, path: str, data: bytes | None, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the body of a 2xx answer; raises as `post`."""
        async with self.stream(method, path, data, timeout_s=timeout_s, headers=headers) as reply:
            return await reply.read()

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, data: bytes | None, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Reply]:
        """Yield a 2xx answer as it arrives, within `timeout_s` seconds; raises as `post`."""
        sent = {**self._headers, **(headers or {})}
        if data is not None:
            sent["Content-Type"] = "application/json"
        with self._our_errors(method, path, timeout_s):
            async with await self._request(timeout_s, method, self.url + path, data=data, headers=sent) as response:
                if response.status >= REDIRECT:
                    raise self.http_error(response.status, await self._refusal(response))
                yield Reply(response, self._too_long(self._most), self._most)

    async def _refusal(self, response: aiohttp.ClientResponse) -> bytes:
        """Return an error's body. Redirects are not followed, as they must not get the key."""
        if (location := response.headers.get("Location")) and response.status < ERROR:
            return f"redirects to {location[:200]!r}, which is not followed; give the server's own address".encode()
        return await Reply(response, self._too_long(MOST_CONTROL), MOST_CONTROL).read()

    async def _request(self, timeout_s: float, *args: Any, **options: Any) -> Any:
        """Return the answer's head; ask an unreachable server again when it is back, within one deadline for all."""
        now = asyncio.get_running_loop().time
        end = now() + timeout_s
        async with asyncio.timeout_at(end):
            while True:
                left = aiohttp.ClientTimeout(total=end - now(), sock_connect=min(CONNECT_S, timeout_s))
                try:
                    response = await self._open().request(*args, timeout=left, allow_redirects=False, **options)
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):  # it was not sent
                    if self.back is None or not await self.back():
                        raise
                    continue
                held_too_long = response.headers.get(ROUTER_ERROR) == HELD_TOO_LONG
                if not held_too_long or self.back is None or not await self.back():
                    return response
                response.release()

    @contextmanager
    def _our_errors(self, method: str, path: str, timeout_s: float) -> Generator[None]:
        call, subject = f"{method} {path}", self._server
        try:
            yield
        except TimeoutError as error:
            kind, within_s = DeadlineError, timeout_s
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                kind, within_s = ConnectTimeoutError, min(CONNECT_S, timeout_s)
            why = f"{subject} did not answer {call}" if subject else f"no answer to {call}"
            raise kind(f"{why} within {within_s:g} s", seconds=within_s, engine=self._engine) from error
        except (aiohttp.ClientError, OSError) as error:
            why, kind = str(error) or type(error).__name__, EngineDeadError
            if isinstance(error, aiohttp.ClientConnectorError):
                number = error.os_error.errno  # negative numbers come from getaddrinfo, which has its own names
                why = os.strerror(number) if number is not None and number > 0 else error.strerror
                why, kind = f"nothing answers at {self._unix_socket or self.url} ({why})", UnreachableError
            why = f"{subject} is gone ({call}): {why}" if subject else f"{call}: {why}"
            raise kind(why, engine=self._engine) from error

    def _too_long(self, most: int) -> Callable[[], EngineError]:
        why = f"its answer is longer than {most >> 20} MiB; see what else answers at that address"
        return lambda: EngineError(self._prefixed(why), engine=self._engine)

    def _prefixed(self, message: str) -> str:
        return message if self._server is None else f"{self._server}: {message}"

    def decode(self, answer: bytes) -> Any:
        """Decode JSON; return None for an empty body. EngineError: it is not JSON."""
        try:
            return orjson.loads(answer) if answer else None
        except orjson.JSONDecodeError as error:
            why = self._prefixed(f"answered {answer[:80]!r}, which is not JSON")
            raise EngineError(why, engine=self._engine) from error

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def end(self) -> None:
        """Close the connections for good; later calls and repetitions raise StateError."""
        self._ended = True
        await self.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._ended:
            raise StateError(f"the connections to {self.name} were closed for good; make another client")
        if self._session is None or self._session.closed:
            raise_file_limit()
            # No limit: the caller bounds requests in flight, and a queue hidden here would look like engine latency.
            if self._unix_socket is not None:
                connector = aiohttp.UnixConnector(str(self._unix_socket), limit=0)
            else:
                connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
            self._session = aiohttp.ClientSession(connector=connector, loop=asyncio.get_running_loop())
        return self._session

    def http_error(self, status: int, answer: bytes) -> EngineHTTPError:
        message, kind = answer.decode(errors="replace").strip() or f"HTTP {status}", ""
        fields: dict[str, Any] = {}
        with suppress(orjson.JSONDecodeError):
            if isinstance(body := orjson.loads(answer), dict):
                fields = cast("dict[str, Any]", body)
        error: Any = fields.get("error", fields)
        if isinstance(error, str):
            message, kind = error, TORN if fields.get("torn") is True else ""
        elif isinstance(error, dict):
            described = cast("dict[str, Any]", error)
            message = str(described.get("message") or described.get("detail") or message)
            kind = str(described.get("type") or "")
        return EngineHTTPError(self._prefixed(message), status=status, error_type=kind, engine=self._engine)
