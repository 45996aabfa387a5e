"""Control calls of an engine's API server to its cores: ours, and vLLM's own that pause, sleep, wake and reload.

Clients of an engine with one core call that core's port (`core.py`). The calls here are for several cores, which pause,
load and resume together, and for a core whose port is closed or unreachable.

vLLM (0.26 to 0.33) has no extension point for its own calls, so methods of its AsyncLLM are replaced.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

import orjson

from penstock.checks import parse_json
from penstock.errors import EngineError, WeightsError
from penstock.plugin import compat
from penstock.plugin.core import field
from penstock.plugin.hooks import RequestHooks
from penstock.plugin.pause import mode_in_core
from penstock.weights.manifest import kind_of

_WEIGHTS = "/penstock/weights/"
_OK = 200
_LED = frozenset({"/pause", "/resume", "/sleep", "/wake_up", "/finish_weight_update", "/collective_rpc"})
"""vLLM's own calls that end in the cores' `PauseState`."""
OUTPUTS_PER_TICK = 128
"""Outputs after which vLLM's output handler yields to the loop (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE's default)."""
_ABORTS = frozenset({"/abort_requests", "/inference/v1/abort_requests"})
_release: ContextVar[bool] = ContextVar("penstock_release", default=False)
"""Whether the pause call of this task requests vLLM's own abort."""


class RefusedError(EngineError):
    """A core's answer that is not a success, with status and body."""

    def __init__(self, reply: tuple[int, Any]) -> None:
        super().__init__(str(reply))
        self.reply = reply


class CoreCalls:
    """Control calls of one API server."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self._core: Any = None
        self._changing = asyncio.Lock()
        """Held by a sleep, which takes memory away, and by an update, which writes to it."""
        self.routes = {
            ("POST", _WEIGHTS + "group"): functools.partial(self._forward, "group"),
            ("POST", _WEIGHTS + "prepare"): functools.partial(self._forward, "prepare"),
            ("POST", _WEIGHTS + "apply"): self._apply,
            ("POST", _WEIGHTS + "loss"): self._loss,
            ("POST", _WEIGHTS + "label"): self._label,
        }
        """Our calls by method and path. Each is called with vLLM's AsyncLLM and the body."""

    # Ours.

    async def _forward(self, step: str, engine: Any, data: bytes) -> Any:
        """Let every core do a step of an update during generation."""
        self._hooks.install(engine)
        return (await on_cores(engine, _WEIGHTS + step, data))[0]

    async def _apply(self, engine: Any, data: bytes) -> dict[str, Any]:
        """Update every core. All cores load before any of them resumes."""
        began = time.perf_counter()
        async with self._changing:
            cores = await on_cores(engine, _WEIGHTS + "load", data)
            checksum = "-".join(core["checksum"] for core in cores)
            if not engine.vllm_config.model_config.is_moe:
                check_replicas(checksum.split("-"), len(cores))
            loaded = time.perf_counter()
            await settle(engine)
            await on_cores(engine, _WEIGHTS + "commit", data)
        slowest = max((core["seconds"] for core in cores), key=lambda seconds: seconds["load"])
        end = time.perf_counter()
        return {
            "version": cores[0]["version"],
            "seconds": {**slowest, "resume": end - loaded, "bubble": end - began},
            **{name: sum(core[name] for core in cores) for name in ("preempted", "kept")},
            "checksum": checksum,
        }

    async def _loss(self, engine: Any, data: bytes) -> dict[str, Any] | None:
        """Return an update's cost on all cores: their lost tokens until the last core has recovered."""
        losses = [loss for loss in await on_cores(engine, _WEIGHTS + "loss", data) if loss is not None]
        if not losses:
            return None
        added = {name: sum(loss[name] for loss in losses) for name in ("tokens", "rate")}
        return {**added, "seconds": max(one["seconds"] for one in losses), "back": all(one["back"] for one in losses)}

    async def _label(self, engine: Any, data: bytes) -> dict[str, Any]:
        """Label tokens with this version. The engine must be paused, weights loaded."""
        version = field(parse_json(data, "the body", WeightsError), "version", int)
        if labels_weights(engine):
            await engine.update_weight_version(str(version))
        else:
            await settle(engine)
            self._hooks.versions.version = version
        self.install(engine)
        await self._weights_are_in()
        return {"version": version}

    # vLLM's own.

    async def lead(self, scope: dict[str, Any], receive: Any) -> Any:
        """Redirect vLLM's own control call to the cores. Return vLLM's `receive`."""
        if scope["method"] != "POST":
            return receive
        if scope["path"] in _ABORTS:
            names, receive = await _names_in(receive)
            self._hooks.note_aborts(names)
        if scope["path"] in _LED:
            self.install(scope["app"].state.engine_client)
            asked = parse_qs(scope.get("query_string", b"").decode(errors="replace")).get("release", [""])
            _release.set(asked[-1].lower() in {"true", "1"})
        return receive

    def install(self, engine: Any) -> None:
        if self._core is not None:
            return
        self._core = core = engine.engine_core
        core.collective_rpc_async = functools.partial(_collect_all_dp_replies, engine)
        engine.pause_generation = self._pause
        engine.resume_generation = functools.partial(core.call_utility_async, "penstock_resume")
        core.sleep_async = self._sleep
        core.wake_up_async = functools.partial(core.call_utility_async, "penstock_wake_up")
        engine.collective_rpc = functools.partial(self._collective_rpc, engine.collective_rpc)
        if labels_weights(engine):  # others get their label later, from `/penstock/weights/label`
            engine.finish_weight_update = functools.partial(self._finish, engine.finish_weight_update)

    async def _pause(
        self,
        *,
        mode: str = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """Replace `AsyncLLM.pause_generation`, without its 20 ms sleep "not required for correctness" (its comment)."""
        mode = compat.pause_mode(mode, wait_for_inflight_requests)
        await self._core.call_utility_async("penstock_pause", _mode(mode), clear_cache)

    async def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        async with self._changing:
            await self._core.call_utility_async("penstock_sleep", level, _mode(mode))

    async def _finish(self, finish: Any, *args: Any, **kwargs: Any) -> None:
        await finish(*args, **kwargs)
        await self._weights_are_in()

    async def _collective_rpc(self, collective_rpc: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        results = await collective_rpc(method, *args, **kwargs)
        if method == "reload_weights":
            await self._weights_are_in()
        return results

    async def _weights_are_in(self) -> None:
        """Resume with new, labelled weights, unless something else holds the engine."""
        await self._core.call_utility_async("penstock_weights_are_in")


def _mode(mode: str) -> str:
    return mode if _release.get() else mode_in_core(mode)


async def _names_in(receive: Any) -> tuple[frozenset[str] | None, Any]:
    """Return the request names in an abort call (None: all), and a `receive` that repeats its body.

    The result is empty for a call that vLLM refuses, or whose client leaves too early.
    """
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())

    async def again() -> dict[str, Any]:
        return messages.pop(0) if messages else await receive()

    try:
        body = orjson.loads(b"".join(message.get("body", b"") for message in messages))
    except orjson.JSONDecodeError:
        body = None
    ids = body.get("request_ids") if isinstance(body, dict) else {}
    if not ids and isinstance(body, dict):
        return None, again
    names = [ids] if isinstance(ids, str) else ids if isinstance(ids, list) else ()
    return frozenset(name for name in names if isinstance(name, str)), again


def labels_weights(engine: Any) -> bool:
    """Whether an AsyncLLM labels its weights."""
    return hasattr(engine, "update_weight_version")


async def settle(engine: Any) -> None:
    """After a pause, return once every earlier output of the cores has been counted.

    All outputs of the old weights are processed once the queue behind the cores' channel is empty.
    """
    if labels_weights(engine):
        return
    queue = engine.engine_core.outputs_queue
    while not queue.empty():  # noqa: ASYNC110 - vLLM's queue has no event for this
        await asyncio.sleep(0)  # lets the output handler in this loop run
    for _ in range(2 + len(engine.output_processor.request_states) // OUTPUTS_PER_TICK):
        await asyncio.sleep(0)


async def on_cores(engine: Any, path: str, data: bytes) -> list[Any]:
    """Call a route of every core, and return their answers. RefusedError: some failed; it has the worst."""
    replies = await call_every_core(engine, "penstock_control", path, data)
    status, answer = max(replies, key=lambda reply: reply[0])
    if status != _OK:
        raise RefusedError((status, answer))
    return [answer for _, answer in replies]


async def call_every_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a utility method of every core, and return the answers in order."""
    client = engine.engine_core
    if len(cores := getattr(client, "core_engines", ())) < 2:  # noqa: PLR2004
        return [await client.call_utility_async(method, *args)]
    one = client._call_utility_async  # noqa: SLF001 - the public call keeps the first answer only
    return await asyncio.gather(*(one(method, *args, engine=core) for core in cores))


async def _collect_all_dp_replies(
    engine: Any,
    method: Any,
    timeout: float | None = None,  # noqa: ASYNC109 - as in vLLM
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Call vLLM's `collective_rpc_async`, and return the answers of all ranks.

    vLLM also calls all of them, but returns only the answers of the first data-parallel replica (0.26 to 0.33:
    `DPLBAsyncMPClient.call_utility_async`).
    """
    replicas = await call_every_core(engine, "collective_rpc", method, timeout, args, kwargs)
    return [answer for of_replica in replicas for answer in of_replica]


def check_replicas(checksums: Sequence[str], replicas: int) -> None:
    """Compare a dense model's data-parallel replicas rank by rank. Experts would be spread over them.

    `checksums` has every rank, replica by replica. WeightsError: a replica has other weights than an earlier one, so
    the engine must not serve.
    """
    ranks = len(checksums) // replicas
    first: dict[tuple[int, str], tuple[int, str]] = {}
    for place, checksum in enumerate(checksums):
        replica, rank = divmod(place, ranks)
        other, known = first.setdefault((rank, kind_of(checksum)), (replica, checksum))
        if checksum != known:
            raise WeightsError(
                f"data-parallel replica {replica} has on rank {rank} weights of checksum {checksum}, replica {other} "
                f"of {known}: they would answer differently"
            )
