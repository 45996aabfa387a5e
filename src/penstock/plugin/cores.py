"""Control of an engine by its API server: for several cores, which pause, load and resume together.

Clients of an engine with one core call that core's port (`core_http.py`). These calls are for several cores, and for a
core whose port is closed or out of reach.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import WeightsError, parse_json
from penstock.plugin.core import field
from penstock.plugin.core_http import RefusedError
from penstock.plugin.middleware import RequestHooks
from penstock.weights.manifest import kind_of

_WEIGHTS = "/penstock/weights/"
_OK = 200


class CoreCalls:
    """Control calls that every core of one engine does."""

    def __init__(self, hooks: RequestHooks) -> None:
        self._hooks = hooks
        self.routes = {
            ("POST", _WEIGHTS + "group"): functools.partial(self._forward, "group"),
            ("POST", _WEIGHTS + "prepare"): functools.partial(self._forward, "prepare"),
            ("POST", _WEIGHTS + "apply"): self._apply,
            ("POST", _WEIGHTS + "loss"): self._loss,
            ("POST", _WEIGHTS + "label"): self._label,
        }
        """By method and path; each is called with vLLM's AsyncLLM and the body."""

    async def _forward(self, step: str, engine: Any, data: bytes) -> Any:
        """Let every core do a step of an update while the engine generates."""
        self._hooks.install(engine)
        return (await on_cores(engine, _WEIGHTS + step, data))[0]

    async def _apply(self, engine: Any, data: bytes) -> dict[str, Any]:
        """Update every core: all have loaded before one goes on."""
        began = time.perf_counter()
        async with self._hooks.pausing.changing:
            cores = await on_cores(engine, _WEIGHTS + "load", data)
            checksum = "-".join(core["checksum"] for core in cores)
            if not engine.vllm_config.model_config.is_moe:
                check_replicas(checksum.split("-"), len(cores))
            loaded = time.perf_counter()
            await self._hooks.versions.settle(engine)
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
        """What an update cost all cores: their tokens, until the last is back."""
        losses = [loss for loss in await on_cores(engine, _WEIGHTS + "loss", data) if loss is not None]
        if not losses:
            return None
        added = {name: sum(loss[name] for loss in losses) for name in ("tokens", "rate")}
        return {**added, "seconds": max(one["seconds"] for one in losses), "back": all(one["back"] for one in losses)}

    async def _label(self, engine: Any, data: bytes) -> dict[str, Any]:
        """Label tokens from here on with this version; the engine must be paused, its weights loaded."""
        version = field(parse_json(data, "the body", WeightsError), "version", int)
        await self._hooks.versions.label(engine, version)
        await self._hooks.pausing.weights_are_in(engine)
        return {"version": version}


async def on_cores(engine: Any, path: str, data: bytes) -> list[Any]:
    """Call a route of every core, and return their answers. RefusedError: the worst of those that fail."""
    replies = await call_every_core(engine, "penstock_control", path, data)
    status, answer = max(replies, key=lambda reply: reply[0])
    if status != _OK:
        raise RefusedError((status, answer))
    return [answer for _, answer in replies]


async def call_every_core(engine: Any, method: str, *args: Any) -> list[Any]:
    """Call a utility method of every core of vLLM's `engine` (its AsyncLLM), and return their answers in order."""
    client = engine.engine_core
    if len(cores := getattr(client, "core_engines", ())) < 2:  # noqa: PLR2004
        return [await client.call_utility_async(method, *args)]
    one = client._call_utility_async  # noqa: SLF001 - the public call keeps the first answer only
    return await asyncio.gather(*(one(method, *args, engine=core) for core in cores))


def collect_all_dp_replies(engine: Any) -> None:
    """Make the engine's `collective_rpc` return what every rank answered; again is harmless.

    vLLM calls all of them too, and returns what the first data-parallel replica answered (0.26 to 0.33:
    `DPLBAsyncMPClient.call_utility_async`).
    """

    async def collect(
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - as vLLM's
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        replicas = await call_every_core(engine, "collective_rpc", method, timeout, args, kwargs)
        return [answer for of_replica in replicas for answer in of_replica]

    engine.engine_core.collective_rpc_async = collect


def check_replicas(checksums: Sequence[str], replicas: int) -> None:
    """Compare a dense model's data-parallel replicas rank by rank; a mixture of experts is spread over them.

    `checksums` are of every rank, replica by replica. WeightsError: a replica has other weights than one before it; the
    engine must not serve.
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
