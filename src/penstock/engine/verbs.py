"""Control calls that no update and no restart needs: pause, sleep, caches, workers' methods, figures, adapters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.control_types import KV, EngineUpdate, PauseMode, TokenLoss
from penstock.engine.control import BAD_REQUEST, ControlClient
from penstock.errors import EngineError, EngineHTTPError, MissingCapabilityError, StateError, WeightsError
from penstock.wire import ADAPTERS

NOT_FOUND = 404
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED, PREEMPTIONS = "vllm:generation_tokens_total", "vllm:num_preemptions_total"
_SERIES = (RUNNING, WAITING, KV_USAGE, GENERATED, PREEMPTIONS)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load of one engine, read from its own metrics."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Fraction of KV blocks in use, 0 to 1."""
    generation_tokens: int
    preemptions: int


def verbs_of(control: ControlClient) -> EngineVerbs:
    """Return `control.verbs`, which the spine does not type."""
    return control.verbs


class EngineVerbs:
    """Further calls to the engine of a `ControlClient`, with its deadline and errors."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    @cached_property
    def adapters(self) -> AdapterCalls:
        """Calls for LoRA adapters."""
        return AdapterCalls(self._control)

    @cached_property
    def native(self) -> NativeTransfer:
        """Native weight transfer of vLLM (R18)."""
        return NativeTransfer(self._control)

    async def stats(self) -> EngineStats:
        """Read the load from /metrics. MissingCapabilityError: it has none."""
        control = self._control
        text = await control.http.call("GET", "/metrics", None, timeout_s=control.timeout_s)
        return engine_stats(text.decode(errors="replace"), control.name)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Pause. When this returns, the engine makes no token.

        The mode `wait` returns when the last request has finished, so it needs a `timeout_s` of a request's length.
        """
        body = {"mode": mode.value, "clear_cache": clear_cache}
        otherwise = f"/pause?mode={mode.value}&clear_cache={str(clear_cache).lower()}"
        await self._control.at_core("/penstock/pause", body, timeout_s, otherwise=otherwise)

    async def resume(self) -> None:
        await self._control.at_core("/penstock/resume", {}, otherwise="/resume")

    async def release(self) -> None:
        """Pause for good and cut requests, so that clients continue them elsewhere.

        The request of another client ends with the finish reason `abort`.
        """
        await self._control.post(f"/pause?mode={PauseMode.ABORT.value}&release=true")

    async def abort(self) -> None:
        await self._control.post("/abort_requests", {})

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, recompute requests. EngineError: it did not do so."""
        answer = await self._control.post("/reset_prefix_cache?reset_running_requests=true")
        if answer is not None and answer.get("success") is False:
            raise EngineError("answered that it could not reset its prefix cache", engine=self._control.name)

    async def sleep(self, level: int) -> None:
        await self._control.post(f"/sleep?level={level}")

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self._control.post("/wake_up" + ("?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""))

    async def collective_rpc(
        self, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        """Call a method on every worker. Return the results in rank order."""
        body = {"method": method, "timeout": timeout_s, "args": list(args), "kwargs": dict(kwargs or {})}
        # One second more than the engine's own deadline, so that its error message arrives.
        # After a worker's error, vLLM's server closes the connection without notice, so no other call may reuse it.
        answer = await self._control.http.post(
            "/collective_rpc", body, timeout_s=timeout_s + 1.0, headers={"Connection": "close"}
        )
        return list(answer["results"]) if answer else []

    async def join_group(self, group: Mapping[str, Any]) -> None:
        """Let every worker start to join a group, during generation.

        `group` is `weights.group.GroupSpec` as JSON. WeightsError: they cannot join.
        """
        await self._control.offer("group", group, refused=(BAD_REQUEST, NOT_FOUND))

    async def token_loss(self, version: int, *, adapter: str | None = None, timeout_s: float) -> TokenLoss | None:
        """Return an update's cost on this engine; None: it was not measured.

        Returns once the engine's rate has recovered, or after `timeout_s` seconds with the loss so far.
        """
        body = {"version": version, "adapter": adapter, "timeout_s": timeout_s}
        answer: Any = await self._control.at_core("/penstock/weights/loss", body, timeout_s + self._control.timeout_s)
        return None if answer is None else TokenLoss(**answer)


def engine_stats(text: str, engine: str) -> EngineStats:
    """Sum the series of /metrics over the data-parallel ranks; average KV usage.

    Raises:
        MissingCapabilityError: a series is missing. The error names `engine`.
        EngineError: a line is not Prometheus text, or its value is not a finite number.
    """
    values: dict[str, list[float]] = defaultdict(list)
    try:
        # Most of vLLM's answer is histogram buckets, which are dropped before parsing.
        wanted = "".join(line + "\n" for line in text.splitlines() if line.startswith(_SERIES))
        for family in text_string_to_metric_families(wanted):
            for sample in family.samples:
                values[sample.name].append(sample.value)
    except ValueError as error:  # from the parser, for a malformed line
        raise EngineError(f"its /metrics cannot be read: {error}", engine=engine) from error
    if odd := [name for name, given in values.items() if not all(map(math.isfinite, given))]:
        raise EngineError(f"its /metrics cannot be read: {', '.join(odd)} is no finite number", engine=engine)
    if missing := [name for name in _SERIES if not values[name]]:
        raise MissingCapabilityError(
            f"engine {engine} does not say how busy it is: its /metrics lacks {', '.join(missing)}; start it without "
            "--disable-log-stats"
        )
    running, waiting, usage, generated, preemptions = (sum(values[name]) for name in _SERIES)
    usage /= len(values[KV_USAGE])
    return EngineStats(int(running), int(waiting), usage, int(generated), int(preemptions))


# --- LoRA adapters ----------------------------------------------------------------------------------------------------

IN_FLIGHT = 409
"""HTTP status with which an engine refuses to unload an adapter in use."""


class AdapterRefusedError(EngineHTTPError, WeightsError):
    """An adapter does not fit the engine's model, or is unreadable."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The state of a LoRA adapter on one engine."""

    version: int | None
    """The adapter's own version; None if the fleet did not load it."""
    in_flight: int
    """Number of its requests in flight."""
    idle_s: float
    """Seconds since its last request came."""


class AdapterCalls:
    """`EngineVerbs.adapters` of an engine with our plugin."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    async def read(self, name: str, source: Mapping[str, Any], *, timeout_s: float) -> None:
        """Let the engine read an adapter while it generates, so that `load` is quick."""
        await self._control.at_core(f"{ADAPTERS}/read", {"name": name, "source": dict(source)}, timeout_s)

    async def load(
        self, name: str, version: int, source: Mapping[str, Any], *, timeout_s: float, kv: KV = "recompute"
    ) -> EngineUpdate:
        """Put a version of an adapter in force between two steps.

        `source`: see `weights.adapter_files.AdapterFiles.source`. AdapterRefusedError: unfit; the old one stays.
        """
        body = {"name": name, "version": version, "source": dict(source), "kv": kv}
        try:
            return self._control.update_of(await self._control.post(f"{ADAPTERS}/load", body, timeout_s=timeout_s))
        except EngineHTTPError as error:
            if error.status == BAD_REQUEST:
                raise AdapterRefusedError(str(error), status=error.status, engine=self._control.name) from error
            raise

    async def unload(self, name: str) -> None:
        """Forget an adapter. EngineHTTPError with status 409: it has requests in flight."""
        await self._control.post(f"{ADAPTERS}/unload", {"name": name})

    async def served(self) -> dict[str, AdapterLoad]:
        """Return the adapters that requests can name."""
        answer: Any = await self._control.http.get(ADAPTERS, timeout_s=self._control.timeout_s)
        return {str(name): AdapterLoad(**given) for name, given in answer.items()}

    async def pause(self, name: str) -> None:
        """Stop an adapter's requests after a token. These and new requests wait."""
        await self._control.at_core(f"{ADAPTERS}/pause", {"name": name})

    async def resume(self, name: str) -> None:
        """Let an adapter's requests continue. Harmless if it is not paused."""
        await self._control.at_core(f"{ADAPTERS}/resume", {"name": name})


class NativeTransfer:
    """Calls of vLLM's native weight transfer to one engine (R18)."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    async def init(self, init_info: Mapping[str, Any]) -> None:
        """Call vLLM's native /init_weight_transfer_engine (R18)."""
        await self._control.post("/init_weight_transfer_engine", {"init_info": dict(init_info)})

    async def update(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """Run vLLM's native start, update and finish calls (R18).

        StateError: the engine is not paused. vLLM 0.26 to 0.32 dies if an update starts while requests run.
        """
        if not await self._control.is_paused():
            raise StateError(f"engine {self._control.name}: pause generation before a native weight update")
        await self._control.post("/start_weight_update")
        await self._control.post("/update_weights", {"update_info": dict(update_info)})
        await self._control.post("/finish_weight_update", {"weight_version": str(version)})
        await self._label(version)

    async def _label(self, version: int) -> None:
        if (await self._control.info()).weight_version != version:  # vLLM 0.26 ignores the label
            await self._control.post("/penstock/weights/label", {"version": version})
