"""A vllm-router that runs already, in the place of ours: its worker calls behind the control interface of a router.

vllm-router has no gate, so new requests wait inside paused engines. It has no epochs, weight versions or draining. It
holds no request, and answers 503 where no engine is up. It drops the caller's key on every path but those that
generate, so engines with a key refuse `/tokenize`. It sends on its callers' key, so the engines of its fleet have that
one, and none of the fleet's own.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlencode

from penstock.aio import all_or_first_error
from penstock.errors import UserError
from penstock.http import HttpTransport
from penstock.router.admin_client import EngineLoad, RouterState
from penstock.router.memory import Membership

CALL_S = 15.0
"""Deadline of one of its worker calls: it answers `/add_worker` after the worker's first good health check."""


class VllmRouterAdmin:
    """A vllm-router's workers as the full sets that a roster announces; see `router.admin_client.RouterAdmin`.

    Every method raises `EngineDeadError` where the router is gone, `DeadlineError` after `CALL_S` seconds, `UserError`
    where something else answers, and `EngineHTTPError` for a worker that it does not take.
    """

    def __init__(self, url: str) -> None:
        self._http = HttpTransport(url, name=f"vllm-router at {url}")
        self._membership = Membership()

    async def announce(self, membership: Membership) -> None:
        """Make its workers those engines that are eligible; others are removed, whoever added them.

        One that drains is removed too: vllm-router would send it new sessions as well. Its requests in flight go on.
        It knows no epochs, so an older one is refused here (`StateError`): of this fleet's own messages the newest is
        in force. Those that may not serve leave before others come. It has no gate, and breaks off nothing.
        """
        announced = self._membership.replaced_by(membership)
        wanted = {entry.url for entry in announced.engines if entry.eligible and not entry.draining}
        present = set((await self._workers()).keys())
        for url in sorted(present - wanted):
            await self._change("remove", url)
        await all_or_first_error(self._change("add", url) for url in sorted(wanted - present))
        self._membership = announced

    async def engines(self) -> RouterState:
        """The set in force. Of its figures it tells each worker's health and requests in flight; the others are 0."""
        workers = await self._workers()
        loads: list[EngineLoad] = []
        for entry in self._membership.engines:
            worker = workers.get(entry.url, {})
            loads.append(
                EngineLoad(
                    name=entry.name,
                    url=entry.url,
                    weight_version=entry.weight_version,
                    eligible=entry.url in workers,
                    down=not worker.get("is_healthy", False),
                    outstanding=worker.get("load", 0),
                    requests=0,
                )
            )
        epoch = self._membership.epoch
        return RouterState(epoch=epoch, gate_closed=False, held=0, sessions=0, requests=0, engines=tuple(loads))

    async def close(self) -> None:
        await self._http.close()

    async def _workers(self) -> dict[str, dict[str, Any]]:
        """Its workers by URL."""
        try:
            answer = await self._http.get("/workers", timeout_s=CALL_S)
            return {worker["url"]: worker for worker in answer["workers"]}
        except (KeyError, TypeError) as error:
            raise UserError(f"{self._http.url} answers, but is no vllm-router ({error!r} in GET /workers)") from error

    async def _change(self, what: Literal["add", "remove"], url: str) -> None:
        await self._http.call("POST", f"/{what}_worker?{urlencode({'url': url})}", b"", timeout_s=CALL_S)
