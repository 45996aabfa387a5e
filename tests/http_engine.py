"""One engine over HTTP: the engine interface on top of the data and the control client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, get_args

from penstock.engine.capabilities import Capability, EngineInfo, require
from penstock.engine.client import STREAM_CHUNK_TOKENS, DataClient
from penstock.engine.control import IN_FLIGHT, ControlClient
from penstock.engine.interface import Engine
from penstock.engine.request import Counters
from penstock.engine.vanilla.control import VanillaControl, VersionHistory
from penstock.engine.vanilla.requests import VanillaReplies
from penstock.errors import (
    DeadlineError,
    EngineHTTPError,
    PenstockError,
    RequestError,
    StateError,
    UpdateError,
    UserError,
    WeightsError,
)
from penstock.types import KV, NamedTensors, PauseMode, UpdateReport
from penstock.weights.adapter_files import AdapterFiles
from penstock.weights.manifest import as_named_tensors
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch


class HTTPEngine(Engine):
    """A running engine server, launched by us or by someone else. Build it with `connect`.

    It may run without our plugin. What it then cannot do raises `MissingCapabilityError`, which says how to start it.
    """

    def __init__(self, control: ControlClient, data: DataClient, info: EngineInfo) -> None:
        self.control = control
        self.data = data
        self._info = info
        self._version = info.weight_version
        self._update: asyncio.Task[UpdateReport] | None = None
        self._store = SharedMemoryStore()
        self._kept = {info.weight_version} if info.kv_kept else set[int]()
        self._adapters: dict[str, _Adapter] = {}
        self._adapter_versions: dict[str, int] = {}
        """The last version of every name, the unloaded too."""
        self._kv_stays = True
        """The pause in force left the KV cache as it was, or another process paused the engine."""
        data.kept = lambda: self._kept

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str | None = None,
        api_key: str | None = None,
        control_timeout_s: float = 60.0,
        request_timeout_s: float = 3600.0,
        stream_chunk_tokens: int = STREAM_CHUNK_TOKENS,
    ) -> Self:
        """Read what the engine is and return it ready for use."""
        history = VersionHistory()
        control = VanillaControl(name or url, url, history=history, api_key=api_key, timeout_s=control_timeout_s)
        async with AsyncExitStack() as opened:
            opened.push_async_callback(control.close)
            info = await control.info()
            opened.pop_all()
        data = DataClient(
            url,
            api_key=api_key,
            request_timeout_s=request_timeout_s,
            name=name,
            vocab_size=info.vocab_size or None,
            stream_chunk_tokens=stream_chunk_tokens,
            routed=False,
        )
        engine = cls(control, data, info)
        history.version = lambda: engine.weight_version
        engines = ((control.name, info.capabilities),)
        data.state.unreported = VanillaReplies(lambda: engines, history)
        return engine

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self._info.tp

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel ranks."""
        return self._info.pp

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self._info.dp

    @property
    def weight_version(self) -> int:
        """Version of the weights in force."""
        return self._version

    @property
    def counters(self) -> Counters:
        """What the client did so that no request was cut short."""
        return self.data.counters

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.KEEP,
        *,
        clear_cache: bool = True,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> None:
        """Stop making tokens (R22, R23). The engine says whether it is paused: other processes may pause it too."""
        if adapter is not None:
            self._require("plugin", "pause_generation(adapter=...)")
            resumed = self._adapter(adapter).resumed
            if not resumed.is_set():
                raise StateError(f"adapter {adapter!r} is already paused; resume it first")
            await self.control.pause_adapter(adapter)
            resumed.clear()
            return
        mode = PauseMode(mode)  # its name will do, as for a fleet
        self._require("pause", "pause_generation")
        if await self.control.is_paused():
            raise StateError("generation is already paused; call resume_generation first")
        # `wait` ends with the longest request in flight, the other modes at once.
        deadline_s = timeout_s or (self.data.request_timeout_s if mode is PauseMode.WAIT else None)
        try:
            await self.control.pause(mode, clear_cache=clear_cache, timeout_s=deadline_s)
        except DeadlineError:
            if timeout_s is not None:
                await self.control.resume()
            raise
        self._kv_stays = not clear_cache

    async def resume_generation(self, *, adapter: str | None = None) -> None:
        """Resume."""
        if adapter is not None:
            resumed = self._adapter(adapter).resumed
            if resumed.is_set():
                raise StateError(f"adapter {adapter!r} is not paused; pause it first")
            await self.control.resume_adapter(adapter)
            resumed.set()
            return
        self._require("pause", "resume_generation")
        if not await self.control.is_paused():
            raise StateError("generation is not paused; there is nothing to resume")
        await self.control.resume()
        self._kv_stays = True

    async def wait_until_resumed(self, adapter: str, *, timeout_s: float) -> None:
        """Return when an adapter is not paused."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._adapter(adapter).resumed.wait()
        except TimeoutError:
            message = f"adapter {adapter!r} is still paused after {timeout_s:g} s"
            raise DeadlineError(message, seconds=timeout_s) from None

    async def update_adapter(
        self, name: str, tensors: Iterable[tuple[str, Any]], *, config: Mapping[str, Any], version: int | None = None
    ) -> UpdateReport:
        """Put a version of a LoRA adapter in force."""
        self._require("plugin", "update_adapter")
        highest = self._adapter_versions.get(name, 0)
        number = highest + 1 if version is None else version
        if number <= highest:
            raise WeightsError(f"adapter {name!r} has had version {highest}; a new one is greater, got {version}")
        began = time.perf_counter()
        files = await asyncio.to_thread(AdapterFiles.of_tensors, tensors, config)
        published = time.perf_counter()
        with ExitStack() as undo:
            undo.callback(files.close)
            deadline_s = self.control.timeout_s
            update = await self.control.load_adapter(name, number, files.source, timeout_s=deadline_s)
            undo.pop_all()
        self._adapter_versions[name] = number
        known = self._adapters.setdefault(name, _Adapter(files))
        if known.files is not files:
            known.files.close()
            known.files = files
        seconds = {"publish": published - began, "total": time.perf_counter() - began}
        return UpdateReport(version=number, bytes=files.nbytes, seconds=seconds, engines=(update,))

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter."""
        known = self._adapter(name)
        try:
            await self.control.unload_adapter(name)
        except EngineHTTPError as error:
            if error.status != IN_FLIGHT:
                raise
            raise StateError(str(error)) from error
        self._adapters.pop(name).files.close()
        known.resumed.set()

    def _adapter(self, name: str) -> _Adapter:
        if name not in self._adapters:
            raise UserError(f"there is no adapter {name!r}; loaded: {', '.join(self._adapters) or 'none'}")
        return self._adapters[name]

    async def abort_generation(self) -> None:
        """End every request in flight with what it has."""
        self._require("abort", "abort_generation")
        self.data.expect_aborts()
        await self.control.abort()

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self._require("caches", "reset_prefix_cache")
        await self.control.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free memory (R26)."""
        if level not in (1, 2):
            raise RequestError(f"sleep level must be 1 (weights kept in host memory) or 2 (dropped), got {level}")
        self._require("sleep", "sleep")
        await self.control.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back."""
        self._require("sleep", "wake_up")
        await self.control.wake_up(tags)

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Call vLLM's native /init_weight_transfer_engine (R18)."""
        self._require("weight_transfer", "init_weight_update_communicator")
        await self.control.init_weight_transfer(init_info)

    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """Call vLLM's native start, update, finish (R18)."""
        self._require("weight_transfer", "update_named_weights")
        if self._kv_stays:
            self._kept.add(version)
        try:
            await self.control.native_update(update_info, version=version)
        except PenstockError:
            self._kept.discard(version)
            raise
        self._version = version

    async def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put new weights in force while requests are in flight. Once begun, it ends even if this call is cancelled."""
        self._require("plugin", "update_weights")
        if self._update is not None and not self._update.done():
            raise StateError("another weight update is under way; wait for it to return")
        target = self._version + 1 if version is None else version
        if target <= self._version:
            raise WeightsError(f"version {target} is not newer than the present version {self._version}")
        if kv not in get_args(KV):
            raise RequestError(f"kv must be one of {', '.join(get_args(KV))}, got {kv!r}")
        if kv == "keep_in_flight":
            self._require("kv_in_flight", f"update_weights with kv={kv!r}")
        self._update = asyncio.create_task(self._apply(as_named_tensors(named_tensors), target, kv))
        return await asyncio.shield(self._update)

    async def _apply(self, named_tensors: Iterable[tuple[str, torch.Tensor]], target: int, kv: KV) -> UpdateReport:
        times = [time.perf_counter()]
        manifest = await asyncio.to_thread(self._store.publish, target, named_tensors)
        times.append(time.perf_counter())
        await self.control.prepare_weights(manifest)
        times.append(time.perf_counter())
        if kv == "keep":
            self._kept.add(target)
        try:
            update = await self.control.apply_weights(target, kv=kv)
        except PenstockError as error:
            raise UpdateError(f"version {target} did not commit, and the engine must not serve: {error}") from error
        self._store.commit(manifest)
        self._version = target
        times.append(time.perf_counter())
        phases = zip(("publish", "prepare", "gate"), times[1:], times, strict=False)
        seconds = {phase: end - begin for phase, end, begin in phases} | {"total": times[-1] - times[0]}
        return UpdateReport(version=target, bytes=manifest.nbytes, seconds=seconds, engines=(update,))

    async def recovered(self, report: UpdateReport, *, timeout_s: float = 60.0) -> UpdateReport:
        """Return the report with its `tokens_lost`; see `Engine.recovered`."""
        loss = await self.control.token_loss(report.version, timeout_s=timeout_s)
        return replace(report, engines=tuple(replace(engine, loss=loss) for engine in report.engines))

    async def get_num_unfinished_requests(self, index: int | None = None) -> int:
        """Return the requests running or waiting (R10)."""
        _only(index)
        stats = await self.control.stats()
        return stats.running + stats.waiting

    async def get_cache_usage(self, index: int | None = None) -> float:
        """Return the fraction of KV blocks in use (R10)."""
        _only(index)
        return (await self.control.stats()).kv_cache_usage

    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker method on every worker (R11)."""
        self._require("rpc", "collective_rpc")
        return await self.control.collective_rpc(method, timeout_s, args, kwargs)

    def _require(self, needed: Capability, operation: str) -> None:
        require(((self.control.name, self._info.capabilities),), needed, operation)

    async def teardown(self) -> None:
        """Close connections and free the published weights; the launcher ends the server itself.

        An update under way ends first, within its deadlines.
        """
        if self._update is not None:
            await asyncio.wait((self._update,))
        await self.data.close()
        await self.control.close()
        self._store.close()
        for known in self._adapters.values():
            known.files.close()


@dataclass(slots=True)
class _Adapter:
    files: AdapterFiles
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless it is paused."""

    def __post_init__(self) -> None:
        self.resumed.set()


def _only(index: int | None) -> None:
    if index not in (None, 0):
        raise RequestError(f"this is one engine: index must be 0 or None, got {index}")
