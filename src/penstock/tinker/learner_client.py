"""Client of the learner process, over HTTP on its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson

from penstock.errors import EngineDeadError, EngineError, reading
from penstock.tinker.futures import Outcome

OPERATION_S = 6 * 3600.0
"""Deadline of one operation, including its wait for other operations."""
ANSWER_S = 10.0
RETURN_S = 300.0
"""Seconds for a dead learner to come back, because its model must be loaded again."""
AGAIN_S = 0.25
OK, ANOTHER, REFUSED = 200, 412, 422
INCARNATION = "X-Incarnation"
"""Header with the start of the learner for which an operation is meant."""


class LearnerClient:
    """Posts operations to the learner process.

    Args:
        path: path of its socket; None: this process has no learner.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None

    async def post(self, kind: str, model: str, request_id: str, body: bytes, incarnation: str) -> Outcome | None:
        """Run an operation, or return its result if it ran before.

        Returns:
            The outcome; None if there is no learner, or another start of it, so that nothing was done.

        Raises:
            EngineDeadError: the learner died, so it is unknown what it did.
        """
        headers = {"X-Operation": kind, "X-Model": model, INCARNATION: incarnation}
        try:
            status, content_type, data = await self._call(
                "POST", f"/operations/{request_id}", OPERATION_S, data=body, headers=headers
            )
        except EngineDeadError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                return None
            raise
        if status == ANOTHER:
            return None
        if status == OK:
            return Outcome(data, content_type)
        if status != REFUSED:
            said = data[:200].decode(errors="replace")
            raise EngineDeadError(f"the learner broke {kind} off with HTTP {status}: {said}")
        with reading("answer of the learner", EngineError):
            answer = orjson.loads(data)
            return Outcome(error=str(answer["error"]), category=str(answer.get("category") or "server"))

    async def models(self) -> dict[str, Mapping[str, Any]]:
        """Return the learner's models by id, each with `steps` and its last save."""
        _, _, data = await self._call("GET", "/models", ANSWER_S)
        with reading("models of the learner", EngineError):
            return dict(cast("Mapping[str, Mapping[str, Any]]", orjson.loads(data)))

    async def returned(self) -> str:
        """Wait until the learner answers. Return a value that changes with each start of the learner.

        Raises:
            EngineDeadError: the learner does not answer within `RETURN_S` seconds.
        """
        end = asyncio.get_running_loop().time() + RETURN_S
        while True:
            try:
                _, _, data = await self._call("GET", "/health", ANSWER_S)
            except EngineDeadError:
                if self._path is None or asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(AGAIN_S)  # no event reports a process that another process starts
                continue
            with reading("health of the learner", EngineError):
                return str(orjson.loads(data)["incarnation"])

    async def close(self) -> None:
        """Close the connections. Operations under way continue in the learner."""
        if self._session is not None:
            await self._session.close()

    async def _call(self, method: str, path: str, deadline_s: float, **options: Any) -> tuple[int, str, bytes]:
        if self._path is None:
            raise EngineDeadError("this process reaches no learner")
        if self._session is None:
            connector = aiohttp.UnixConnector(str(self._path), limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.request(method, f"http://learner{path}", timeout=timeout, **options) as answer:
                return answer.status, answer.content_type, await answer.read()
        except TimeoutError as error:
            raise EngineDeadError(f"the learner did not answer within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDeadError(f"the learner is gone: {str(error) or type(error).__name__}") from error
