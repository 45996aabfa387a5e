"""Client of the learner process, over HTTP on its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, PenstockError, UserError
from penstock.http import MOST_DATA, HttpTransport, UnreachableError
from penstock.tinker.futures import Operation

OPERATION_S = 6 * 3600.0
"""Deadline of one operation, including its wait for other operations."""
ANSWER_S = 10.0
RETURN_S = 300.0
"""Seconds for a dead learner to come back, because its model must be loaded again."""
AGAIN_S = 0.25
REFUSED, FAILED, ANOTHER = 400, 409, 412
"""Statuses of an operation: it cannot be met; it failed; it was meant for another start. Any other is a death."""
INCARNATION = "X-Incarnation"
"""Header with the start of the learner for which an operation is meant."""


class RestartedError(Exception):
    """There is no learner, or another start of it. Nothing was done."""


class LearnerClient:
    """Posts operations to the learner process.

    Args:
        path: path of its socket; None: this process has no learner.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._http = HttpTransport("http://learner", unix_socket=path, most=MOST_DATA)

    async def post(self, operation: Operation, incarnation: str, body: bytes) -> tuple[bytes, str]:
        """Run an operation with `body`, or return its result if it ran before: the data and their media type.

        Raises:
            UserError: the operation cannot be met. PenstockError: it failed.
            RestartedError: nothing was done.
            EngineDeadError: the learner died, so it is unknown what it did. DeadlineError: it did not answer.
        """
        headers = {"X-Operation": operation.kind, "X-Model": operation.scope, INCARNATION: incarnation}
        path = f"/operations/{operation.id}"
        try:
            async with self._http.stream("POST", path, body, timeout_s=OPERATION_S, headers=headers) as reply:
                return await reply.read(), reply.content_type
        except UnreachableError as error:
            raise RestartedError from error
        except EngineHTTPError as error:
            if error.status == ANOTHER:
                raise RestartedError from error
            if error.status in {REFUSED, FAILED}:
                raise (UserError if error.status == REFUSED else PenstockError)(str(error)) from error
            raise EngineDeadError(f"the learner broke {operation.kind} off: {error}") from error  # it ends
        except EngineDeadError as error:
            raise EngineDeadError(f"the learner is gone: {error}") from error

    async def returned(self) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
        """Wait until the learner answers.

        Returns:
            A value that changes with each start of the learner, and its models by id, each with `steps` and its last
            save.

        Raises:
            EngineDeadError, DeadlineError: the learner does not answer within `RETURN_S` seconds.
        """
        if self._path is None:
            raise EngineDeadError("this process reaches no learner")
        end = asyncio.get_running_loop().time() + RETURN_S
        while True:
            try:
                state = await self._http.get("/models", timeout_s=ANSWER_S)
            except (EngineDeadError, DeadlineError):
                if asyncio.get_running_loop().time() > end:
                    raise
            else:
                return str(state["incarnation"]), state["models"]
            await asyncio.sleep(AGAIN_S)  # no event reports a process that another process starts

    async def close(self) -> None:
        """Close the connections. Operations under way continue in the learner."""
        await self._http.close()
