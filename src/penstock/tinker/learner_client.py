"""Client of the learner process, over HTTP on its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.checks import reading
from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError
from penstock.http import MOST_DATA, HttpTransport, UnreachableError
from penstock.tinker.futures import Outcome

OPERATION_S = 6 * 3600.0
"""Deadline of one operation, including its wait for other operations."""
ANSWER_S = 10.0
RETURN_S = 300.0
"""Seconds for a dead learner to come back, because its model must be loaded again."""
AGAIN_S = 0.25
ANOTHER = 412
"""Status of an operation that was meant for another start of the learner."""
FAILED_TYPE = "application/problem+json"
"""Media type of a failed operation's answer, `{"error", "category"}`."""
INCARNATION = "X-Incarnation"
"""Header with the start of the learner for which an operation is meant."""


class LearnerClient:
    """Posts operations to the learner process.

    Args:
        path: path of its socket; None: this process has no learner.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._http = HttpTransport("http://learner", server="the learner", unix_socket=path, most=MOST_DATA)

    async def post(self, kind: str, model: str, request_id: str, body: bytes, incarnation: str) -> Outcome | None:
        """Run an operation, or return its result if it ran before.

        Returns:
            The outcome; None if there is no learner, or another start of it, so that nothing was done.

        Raises:
            EngineDeadError: the learner died, so it is unknown what it did. DeadlineError: it did not answer.
        """
        headers = {"X-Operation": kind, "X-Model": model, INCARNATION: incarnation}
        path = f"/operations/{request_id}"
        try:
            async with self._http.stream("POST", path, body, timeout_s=OPERATION_S, headers=headers) as reply:
                data, media_type = await reply.read(), reply.content_type
        except UnreachableError:
            return None
        except EngineHTTPError as error:
            if error.status == ANOTHER:
                return None
            raise EngineDeadError(f"the learner broke {kind} off: {error}") from error  # it ends
        if media_type != FAILED_TYPE:
            return Outcome(data, media_type)
        with reading("answer of the learner", EngineError):
            answer = orjson.loads(data)
            return Outcome(error=str(answer["error"]), category=str(answer["category"]))

    async def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the learner's models by id, each with `steps` and its last save."""
        return await self._http.get("/models", timeout_s=ANSWER_S)

    async def returned(self) -> str:
        """Wait until the learner answers. Return a value that changes with each start of the learner.

        Raises:
            EngineDeadError, DeadlineError: the learner does not answer within `RETURN_S` seconds.
        """
        if self._path is None:
            raise EngineDeadError("this process reaches no learner")
        end = asyncio.get_running_loop().time() + RETURN_S
        while True:
            try:
                return str((await self._http.get("/health", timeout_s=ANSWER_S))["incarnation"])
            except (EngineDeadError, DeadlineError):
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(AGAIN_S)  # no event reports a process that another process starts

    async def close(self) -> None:
        """Close the connections. Operations under way continue in the learner."""
        await self._http.close()
