"""The control port of one router process, where its fleet announces engines, gate and policy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.control_server import ControlServer, Route, respond
from penstock.errors import UserError
from penstock.guard import cross_site
from penstock.rooms import plugged_in
from penstock.router.dispatcher import Dispatcher
from penstock.router.membership import Membership

ANNOUNCE = "PUT /router/engines"
_MAX_BODY = 4 << 20
_reader_of = cache(TypeAdapter)
T = TypeVar("T")


def serve_control(
    dispatcher: Dispatcher, listening: socket.socket, hosts: Collection[str], api_key: str | None, admin_key: str | None
) -> ControlServer:
    """Serve the control calls of this router at a socket. A call is in force when it is answered.

    Announcements need `admin_key`, else `api_key`; the other calls take either, and none if there is no `api_key`.
    """
    loop = asyncio.get_running_loop()

    async def run(call: Callable[[Dispatcher, bytes], Any], body: bytes) -> Any:
        return call(dispatcher, body)

    def route(call: Callable[[Dispatcher, bytes], Any]) -> Route:
        return lambda body: respond(lambda: asyncio.run_coroutine_threadsafe(run(call, body), loop))

    calls = {ANNOUNCE: _announce, **plugged_in("router.other_calls")()}
    owners = [key for key in (admin_key or api_key,) if key]
    clients = [key for key in (admin_key, api_key) if key] if api_key else []
    return ControlServer(
        listening,
        {name: route(call) for name, call in calls.items()},
        lambda name: owners if name == ANNOUNCE else clients,
        refuse_page=partial(cross_site, known=hosts, setting="router.allowed_hosts"),
        max_body=_MAX_BODY,
    )


def _announce(dispatcher: Dispatcher, body: bytes) -> dict[str, Any]:
    dispatcher.set_membership(parse(Membership, body))
    return {"epoch": dispatcher.membership.epoch, "engines": len(dispatcher.backends)}


def parse(model: type[T], body: bytes) -> T:
    """Read a body. UserError: it does not fit."""
    try:
        return _reader_of(model).validate_json(body)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'body'}: {e['msg']}" for e in error.errors())
        raise UserError(f"the body does not fit: {what.replace('Value error, ', '')}") from None
