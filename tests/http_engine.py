"""One engine over HTTP, as the tests of engines use it: the data client, and control calls without a fleet around."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from penstock.control_types import KV, NamedTensors, PauseMode, UpdateReport
from penstock.engine.capabilities import EngineInfo
from penstock.engine.client import STREAM_CHUNK_TOKENS, Counters, DataClient
from penstock.engine.command import server_command
from penstock.engine.control import ControlClient
from penstock.engine.launch import EngineProcess
from penstock.engine.openai import OpenAIEngine
from penstock.engine.vanilla import VanillaControl, VanillaReplies
from penstock.settings import EngineConfig
from penstock.weights.adapter_files import AdapterFiles
from penstock.weights.manifest import as_named_tensors
from penstock.weights.shared_memory import SharedMemoryStore


class HTTPEngine(OpenAIEngine):
    """A running engine server, with our plugin or without it. Build it with `connect` or `connected`.

    It refuses nothing by itself: what a fleet checks before it asks engines, tests of the fleet hold.
    """

    def __init__(self, control: ControlClient, data: DataClient, info: EngineInfo) -> None:
        self.control = control
        self.data = data
        self._info = info
        self._version = info.weight_version
        self._store = SharedMemoryStore()
        self._kept = {info.weight_version} if info.kv_kept else set[int]()
        self._adapters: dict[str, tuple[int, AdapterFiles]] = {}
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
        control = VanillaControl(name or url, url, api_key=api_key, timeout_s=control_timeout_s)
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
        engines = ((control.name, info.capabilities),)
        data.unreported = VanillaReplies(lambda: engines)
        return engine

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, **options: Any) -> AsyncIterator[Self]:
        """As `connect`, torn down at the end of the block."""
        engine = await cls.connect(url, **options)
        try:
            yield engine
        finally:
            await engine.teardown()

    @property
    def tp_size(self) -> int:
        return self._info.tp

    @property
    def pp_size(self) -> int:
        return self._info.pp

    @property
    def dp_size(self) -> int:
        return self._info.dp

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def counters(self) -> Counters:
        return self.data.counters

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.KEEP,
        *,
        clear_cache: bool = True,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> None:
        if adapter is not None:
            await self.control.verbs.adapters.pause(adapter)
            return
        deadline_s = timeout_s or (self.data.request_timeout_s if mode is PauseMode.WAIT else None)
        await self.control.verbs.pause(mode, clear_cache=clear_cache, timeout_s=deadline_s)

    async def resume_generation(self, *, adapter: str | None = None) -> None:
        await (self.control.verbs.resume() if adapter is None else self.control.verbs.adapters.resume(adapter))

    async def update_adapter(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        *,
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        before = self._adapters.get(name)
        number = version or (before[0] if before else 0) + 1
        files = await asyncio.to_thread(AdapterFiles.of_tensors, tensors, config)
        with ExitStack() as undo:
            undo.callback(files.close)
            timeout_s = self.control.timeout_s
            update = await self.control.verbs.adapters.load(name, number, files.source, timeout_s=timeout_s, kv=kv)
            undo.pop_all()
        if before is not None:
            before[1].close()
        self._adapters[name] = number, files
        return UpdateReport(version=number, bytes=files.nbytes, seconds={}, engines=(update,), adapter=name)

    async def unload_adapter(self, name: str) -> None:
        await self.control.verbs.adapters.unload(name)
        self._adapters.pop(name)[1].close()

    async def abort_generation(self) -> None:
        if self.data.unreported is not None:
            self.data.unreported.expect_aborts()
        await self.control.verbs.abort()

    async def reset_prefix_cache(self) -> None:
        await self.control.verbs.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        await self.control.verbs.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self.control.verbs.wake_up(tags)

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        await self.control.verbs.native.init(init_info)

    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        await self.control.verbs.native.update(update_info, version=version)
        self._version = version

    async def update_weights(
        self, named_tensors: NamedTensors, *, version: int | None = None, kv: KV = "recompute"
    ) -> UpdateReport:
        target = self._version + 1 if version is None else version
        began = time.perf_counter()
        manifest = await asyncio.to_thread(self._store.publish, target, as_named_tensors(named_tensors))
        await self.control.prepare_weights(manifest)
        if kv == "keep":
            self._kept.add(target)
        update = await self.control.apply_weights(target, kv=kv)
        self._store.commit(manifest)
        self._version = target
        seconds = {"total": time.perf_counter() - began}
        return UpdateReport(version=target, bytes=manifest.nbytes, seconds=seconds, engines=(update,))

    async def recovered(self, report: UpdateReport, *, timeout_s: float = 60.0) -> UpdateReport:
        loss = await self.control.verbs.token_loss(report.version, adapter=report.adapter, timeout_s=timeout_s)
        return replace(report, engines=tuple(replace(engine, loss=loss) for engine in report.engines))

    async def get_num_unfinished_requests(self, index: int | None = None) -> int:  # noqa: ARG002 - there is one
        stats = await self.control.verbs.stats()
        return stats.running + stats.waiting

    async def get_cache_usage(self, index: int | None = None) -> float:  # noqa: ARG002 - there is one
        return (await self.control.verbs.stats()).kv_cache_usage

    async def prefix_hits(self) -> int:
        """Tokens that vLLM has found in its prefix cache since it started."""
        text = (await self.control.http.call("GET", "/metrics", None, timeout_s=60)).decode()
        return int(sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE))))

    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return await self.control.verbs.collective_rpc(method, timeout_s, args, kwargs)

    async def teardown(self) -> None:
        """Close connections and free the published weights; the launcher ends the server itself."""
        await self.data.close()
        await self.control.close()
        self._store.close()
        for _, files in self._adapters.values():
            files.close()


@asynccontextmanager
async def launched_engine(
    config: EngineConfig, name: str, log_dir: Path, *, api_key: str | None = None, **options: Any
) -> AsyncIterator[tuple[HTTPEngine, EngineProcess]]:
    """An engine in a process of its own, which ends with the block. `options`: of `HTTPEngine.connect`."""
    process = await EngineProcess.launch(server_command(config, api_key=api_key), name=name, log_dir=log_dir)
    try:
        async with HTTPEngine.connected(process.url, name=name, api_key=api_key, **options) as engine:
            yield engine, process
    finally:
        await process.stop()
