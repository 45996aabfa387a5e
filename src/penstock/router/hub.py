"""Several processes that serve one port as one router: the hub starts them, keeps them, and speaks for them.

The hub is the process that was started. It serves no request: each worker has a listening socket of its own on the
port, over which the kernel spreads connections, and places its requests by itself, with the sessions and the load of
all workers in shared memory. What changes the router (membership, gates) goes through the hub, which has it in force
on every worker before it answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import orjson

from penstock.config import RouterConfig, refuse_open_host
from penstock.errors import EngineStartError, PenstockError, UserError
from penstock.router.admin_calls import PROMETHEUS, announced
from penstock.router.doorbell import Doorbell, make_bells
from penstock.router.engine_slots import EngineSlots
from penstock.router.listen import listen
from penstock.router.membership import Membership
from penstock.router.merge import from_plain, merge_families, merge_states
from penstock.router.prometheus import render
from penstock.router.refusal import RefusalError
from penstock.router.shared_loads import SharedLoads
from penstock.router.shared_state import Layout, SharedState
from penstock.router.worker_process import WorkerProcess

logger = logging.getLogger(__name__)

CALL_S = 4.0
"""Deadline of a call to a worker, which answers in a millisecond; one that does not is killed and started anew."""
START_S = 20.0
"""Deadline of a worker's start, which takes a fraction of a second on an idle machine."""
PING_S = 2.0
"""Between two questions whether the workers are well: a process that hangs gives no event."""
STOP_S = 3.0
"""Between SIGTERM and SIGKILL."""
BRIEF_S = 5.0
"""A worker that ends sooner than this after its start counts as not started."""
TRIES = 5
"""Starts in a row that may fail before the router gives up."""


class Hub:
    """A router of `config.workers` processes.

    Args:
        config: of each of them.
        api_key: what clients must send.
        admin_key: what calls that change the router must send; None: `api_key`.
        given_up: called when it cannot go on; `failure` says why.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.url = ""
        self.failure: PenstockError | None = None
        self._api_key = api_key
        self._admin_key = admin_key
        self._given_up = given_up
        self._layout = Layout(config.workers)
        self._shared = SharedState.create(self._layout)
        self._bells = make_bells(self._layout.rows)
        bell = Doorbell(self._shared, self._bells, config.workers)
        self._loads = SharedLoads(self._shared, config.workers, bell)
        self._slots = EngineSlots(self._layout.engines)
        self._membership = Membership()
        self._announcement: dict[str, Any] | None = None
        """The call that announced the set in force; for workers that are started later."""
        self._policy: str | None = None
        """Body of a call that sets the policy which is in force; for the same."""
        self._gates: dict[tuple[str | None, str | None], str] = {}
        """Bodies of the calls that closed the gates which are closed: by adapter and engine."""
        self._changing = asyncio.Lock()
        """One change at a time, so that all workers see them in one order."""
        self._changes: set[asyncio.Task[dict[str, Any]]] = set()
        self._sockets: list[socket.socket] = []
        self._workers: dict[int, WorkerProcess] = {}
        """Those that serve."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers; returns when they serve.

        Raises:
            ConfigError: other machines can reach the address, and there is no key.
            UserError: the address cannot be used.
            EngineStartError: a worker does not start.
        """
        refuse_open_host(self.config.host, self._api_key)
        self._sockets = listen(self.config.host, self.config.port, self.config.workers)
        host, port = self._sockets[0].getsockname()[:2]
        ready = [asyncio.get_running_loop().create_future() for _ in self._sockets]
        self._tasks = [asyncio.create_task(self._keep(index, future)) for index, future in enumerate(ready)]
        await asyncio.gather(*ready)
        self._tasks.append(asyncio.create_task(self._ping()))
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """End all workers; answers under way end as broken transfers."""
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._changes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        for bell in self._bells:
            os.close(bell)
        self._shared.close()

    # --- workers -----------------------------------------------------------------------------------------------------

    async def _keep(self, index: int, ready: asyncio.Future[None]) -> None:
        """Have a worker run in this place until we are cancelled."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                status: int | OSError = await self._run(index, ready)
            except OSError as error:  # no process, or no socket, to be had
                status = error
            failures = failures + 1 if time.monotonic() - began < BRIEF_S else 0
            if failures == TRIES:
                break
            logger.warning("router worker %d ended with status %s; starting it anew", index, status)
            if failures > 1:
                await asyncio.sleep(0.05 * 2**failures)  # what keeps it from starting may pass
        self.failure = EngineStartError(f"router worker {index} ended {TRIES} times in a row right after its start")
        if ready.done():
            self._given_up()
        else:
            ready.set_exception(self.failure)

    async def _run(self, index: int, ready: asyncio.Future[None]) -> int:
        """One life of a worker; returns its exit status."""
        worker = await WorkerProcess.start(
            index,
            self._layout,
            memory=self._shared.fd,
            bells=self._bells,
            listening=self._sockets[index],
            handler=self._said,
        )
        try:
            if await self._begin(index, worker) and not ready.done():
                ready.set_result(None)
            return await worker.wait()
        except asyncio.CancelledError:
            worker.terminate()
            raise
        finally:
            self._workers.pop(index, None)
            try:
                async with asyncio.timeout(STOP_S):
                    await worker.wait()
            except TimeoutError:
                worker.kill()
                await worker.wait()
            await worker.release()
            self._loads.bury(index)

    async def _begin(self, index: int, worker: WorkerProcess) -> bool:
        """Bring a new worker to the state of the others, and let it serve; kills it where it does not follow."""
        config = self.config.model_dump(mode="json")
        prepare = {"do": "prepare", "config": config, "api_key": self._api_key, "admin_key": self._admin_key}
        try:
            await worker.call(prepare, deadline_s=START_S)
            async with self._changing:
                if self._announcement is not None:
                    await worker.call(self._announcement, deadline_s=CALL_S)
                if self._policy is not None:  # it may have been set since `config` was read
                    await worker.call(_execute("PUT", "/router/policy", self._policy), deadline_s=CALL_S)
                for body in self._gates.values():
                    await worker.call(_execute("POST", "/router/gate", body), deadline_s=CALL_S)
                await worker.call({"do": "serve"}, deadline_s=CALL_S)
                self._workers[index] = worker
        except PenstockError as error:
            logger.warning("router worker %d did not start: %s", index, error)
            worker.kill()
            return False
        return True

    async def _all(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Call every worker; returns the answers, of at least one.

        Who does not answer in time, or refuses what another one does, is killed: its successor will be as the others.

        Raises:
            RefusalError: they refused, all of them; or there is none.
        """
        workers = list(self._workers.values())
        results = await asyncio.gather(
            *(worker.call(message, deadline_s=CALL_S) for worker in workers), return_exceptions=True
        )
        answers = [result for result in results if isinstance(result, dict)]
        for worker, result in zip(workers, results, strict=True):
            if isinstance(result, RefusalError) and not answers:
                raise result
            if isinstance(result, PenstockError):
                logger.warning("router worker %d (%s) is ended: %s", worker.pid, message["do"], result)
                worker.kill()
            elif isinstance(result, BaseException):
                raise result
        if not answers:
            raise RefusalError(503, "no_worker", "every process of the router is being started anew; retry")
        return answers

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)  # nothing happens when a process hangs
            try:
                await self._all({"do": "ping"})
            except RefusalError:
                continue  # they are being started

    # --- what the router is told and asked ---------------------------------------------------------------------------

    async def _said(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a worker has to say: a call to the admin endpoints that it got, or what it learnt of an engine."""
        if "from" in message:
            for index, worker in self._workers.items():
                if index != message["from"]:
                    worker.tell(message)
            return {}
        body = message["body"]
        match message["method"], message["path"]:
            case "PUT", "/router/engines":
                return _json(await self._whole(self._set_engines(body)))
            case "POST", "/router/gate":
                return _json(await self._whole(self._set_gate(body)))
            case "PUT", "/router/policy":
                return _json(await self._whole(self._set_policy(body)))
            case "GET", "/router/engines":
                return _json(merge_states(await self._all(_execute("GET", "/router/engines", ""))))
            case "GET", _:
                reports = [from_plain(answer["families"]) for answer in await self._all({"do": "families"})]
                return {"content": render(merge_families(reports)), "type": PROMETHEUS}
            case _:
                raise RefusalError(404, "not_found", f"no such endpoint: {message['path']}")

    async def _whole(self, change: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Have a change run to its end also where the worker that passed it on ends before."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may be left to hear of it

    async def _set_engines(self, body: str) -> dict[str, Any]:
        async with self._changing:
            membership = announced(self._membership, body.encode())
            try:
                fresh = self._slots.assign(membership.engines, self._loads.busy)
            except UserError as error:
                raise RefusalError(400, "bad_engines", str(error)) from error
            self._loads.clear(fresh)
            slots = self._slots
            self._loads.set_engines(slots.slots, slots.lost)
            call = {"do": "engines", "homes": slots.homes, "slots": slots.slots, "lost": slots.lost, "body": body}
            self._membership = membership
            self._announcement = {**call, "lost": []}
            self._gates = {key: closed for key, closed in self._gates.items() if key[1] not in slots.lost}
            return (await self._all(call))[0]

    async def _set_gate(self, body: str) -> dict[str, Any]:
        async with self._changing:
            answer = (await self._all(_execute("POST", "/router/gate", body)))[0]
            key = (answer.get("adapter"), answer.get("engine"))
            if answer["closed"]:
                self._gates[key] = body
            else:
                self._gates.pop(key, None)
            return answer

    async def _set_policy(self, body: str) -> dict[str, Any]:
        async with self._changing:
            answer = (await self._all(_execute("PUT", "/router/policy", body)))[0]
            self._policy = orjson.dumps(answer).decode()
            return answer


def _execute(method: str, path: str, body: str) -> dict[str, Any]:
    return {"do": "execute", "method": method, "path": path, "body": body}


def _json(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": orjson.dumps(answer).decode(), "type": "application/json"}
