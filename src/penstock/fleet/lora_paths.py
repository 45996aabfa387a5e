"""SkyRL's HTTP paths that pause one LoRA adapter, on the owner's socket.

SkyRL aborts an adapter's requests and lets its client send them again. Here they wait in the engines, so `aborted` is
empty and `count` says how many wait. The gate closes before any is stopped, with no grace period: engines hold what
arrives later.
"""

from __future__ import annotations

from typing import Any, cast

from aiohttp import web

from penstock.errors import DeadlineError, PenstockError, StateError, UserError
from penstock.fleet.adapters import FleetAdapters
from penstock.parsing import parse_json

PREFIX = "/skyrl/v1"
WAIT_S = 30.0
"""Of a long poll that names no `timeout_s`."""


class LoraPaths:
    """Answers `POST /skyrl/v1/{abort_lora_requests,resume_lora_requests,wait_lora_unpaused}` with `{"lora_name"}`."""

    def __init__(self, adapters: FleetAdapters) -> None:
        self._adapters = adapters

    def add_to(self, app: web.Application) -> None:
        """Serve the paths."""
        for call in (self.abort_lora_requests, self.resume_lora_requests, self.wait_lora_unpaused):
            app.router.add_post(f"{PREFIX}/{call.__name__}", self._handler(call))

    async def abort_lora_requests(self, name: str, _body: dict[str, Any]) -> dict[str, Any]:
        """Pause an adapter; harmless if it is paused."""
        if not (await self._adapters.status(name)).paused:
            await self._adapters.pause(name)
        return {"status": "ok", "aborted": [], "count": (await self._adapters.status(name)).in_flight}

    async def resume_lora_requests(self, name: str, _body: dict[str, Any]) -> dict[str, Any]:
        """Resume an adapter; harmless if it is not paused."""
        if (await self._adapters.status(name)).paused:
            await self._adapters.resume(name)
        return {"status": "ok"}

    async def wait_lora_unpaused(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return when an adapter is not paused, or with `paused` true after `timeout_s` seconds."""
        timeout_s = body.get("timeout_s", WAIT_S)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s < 86400:  # noqa: PLR2004 - a day
            raise UserError(f"timeout_s must be seconds, at most a day, got {timeout_s!r}")
        try:
            await self._adapters.wait(name, timeout_s)
        except DeadlineError:
            return {"status": "ok", "paused": True}
        return {"status": "ok", "paused": False}

    def _handler(self, call: Any) -> Any:
        async def answer(http: web.Request) -> web.Response:
            try:
                given = parse_json(await http.read() or b"{}", "the body")
                body = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
                name = body.get("lora_name")
                if not isinstance(name, str) or not name:
                    raise UserError("'lora_name' required")
                return web.json_response(await call(name, body))
            except PenstockError as error:
                status = 400 if isinstance(error, UserError) else 409 if isinstance(error, StateError) else 500
                return web.json_response({"detail": str(error)}, status=status)

        return answer
