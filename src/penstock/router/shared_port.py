"""Admin calls on a port that several processes serve: each is answered for all of them, or refused with the reason."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from penstock.router.admin import JSON, PROMETHEUS, Answer, execute, finished_session
from penstock.router.http import RefusalError

if TYPE_CHECKING:
    from penstock.router.dispatcher import Dispatcher

CALL_S = 5.0
"""Deadline of a call to the other processes; one that is started again answers within a second."""


class SharedPort:
    """What one of several processes does with admin calls.

    Args:
        host: address of the control ports.
        port: this process's control port, where it answers for itself.
        control_ports: those of all processes.
        api_key: what each of them asks for.
    """

    def __init__(self, host: str, port: int, control_ports: tuple[int, ...], api_key: str | None) -> None:
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._port = port
        self.control_ports = control_ports
        self._api_key = api_key

    def answers(self, transport: asyncio.Transport) -> bool:
        """Whether a call came by the shared port, and not by this process's control port."""
        return transport.get_extra_info("sockname")[1] != self._port

    async def call(self, dispatcher: Dispatcher, method: str, path: str, body: bytes) -> Answer:
        """Answer for all processes.

        Raises:
            RefusalError: 421 for a call that changes the router, since it would reach one process; and as `execute`.
            PenstockError: another process does not answer.
        """
        from penstock.router.admin_client import RouterAdmin  # noqa: PLC0415 - aiohttp, for those who ask here

        admin = RouterAdmin(self._url, self._api_key, timeout_s=CALL_S)
        try:
            match method, path:
                case "GET", "/router/engines":
                    return orjson.dumps(await admin.state()), JSON
                case "GET", "/router/metrics" | "/metrics":
                    return (await admin.metrics()).encode(), PROMETHEUS
                case "PUT", "/router/engines" | "/router/policy":
                    raise self._misdirected(method, path)
                case "POST", "/router/gate":
                    raise self._misdirected(method, path)
                case "POST", "/router/sessions/finish":
                    finished = await admin.finish_session(finished_session(body))
                    return orjson.dumps({"finished": finished}), JSON
                case _:
                    return execute(dispatcher, method, path, body)
        finally:
            await admin.close()

    def _misdirected(self, method: str, path: str) -> RefusalError:
        ports = ", ".join(map(str, self.control_ports))
        what = f"{len(self.control_ports)} processes serve this port, and {method} {path} would reach one"
        return RefusalError(421, "several_processes", f"{what}; make the call on each control port: {ports}")
