"""SkyRL's HTTP calls that pause one adapter, served on the control socket of a fleet.

SkyRL aborts an adapter's requests, and its client sends them again. Here they wait in the engines, so `aborted` is
empty and `count` is the number that wait. There is no grace period; engines hold later requests too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aiohttp import web

from penstock.checks import parse_json, reading
from penstock.errors import DeadlineError, PenstockError, StateError, UserError
from penstock.fleet.adapters import FleetAdapters
from penstock.fleet.pausing import seconds

POLL_S = 30.0
"""Seconds of a long poll without `timeout_s`."""


async def _abort(adapters: FleetAdapters, name: str, _timeout_s: float) -> dict[str, Any]:
    await adapters.pause(name, again=True)
    return {"aborted": [], "count": (await adapters.status(name)).in_flight}


async def _resume(adapters: FleetAdapters, name: str, _timeout_s: float) -> dict[str, Any]:
    await adapters.resume(name, again=True)
    return {}


async def _wait(adapters: FleetAdapters, name: str, timeout_s: float) -> dict[str, Any]:
    with suppress(DeadlineError):
        await adapters.wait(name, timeout_s)
        return {"paused": False}
    return {"paused": True}


SKYRL = {"abort_lora_requests": _abort, "resume_lora_requests": _resume, "wait_lora_unpaused": _wait}
"""Handlers of `POST /skyrl/v1/NAME` with `{"lora_name"}`, by name; pausing or resuming twice is harmless."""


def add_skyrl_paths(app: web.Application, adapters: FleetAdapters) -> None:
    """Add SkyRL's calls to an application."""

    async def answer(http: web.Request) -> web.Response:
        try:
            given: Any = parse_json(await http.read(), "the body")
            with reading("body"):
                name, timeout_s = str(given["lora_name"]), seconds(given.get("timeout_s", POLL_S))
                done = await SKYRL[http.match_info["call"]](adapters, name, timeout_s or 0.0)
            return web.json_response({"status": "ok", **done})
        except PenstockError as error:
            status = 400 if isinstance(error, UserError) else 409 if isinstance(error, StateError) else 500
            return web.json_response({"detail": str(error)}, status=status)

    app.router.add_post(f"/skyrl/v1/{{call:{'|'.join(SKYRL)}}}", answer)
