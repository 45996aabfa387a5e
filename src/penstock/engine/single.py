"""One engine over HTTP: the engine interface on top of the data and the control client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, get_args

from penstock.engine.capabilities import Capability, require
from penstock.engine.client import STREAM_CHUNK_TOKENS, DataClient
from penstock.engine.control import ControlClient, EngineInfo
from penstock.engine.interface import Engine
from penstock.engine.request import Counters
from penstock.engine.vanilla.control import VanillaControl, VersionHistory
from penstock.engine.vanilla.requests import VanillaReplies
from penstock.errors import DeadlineError, PenstockError, RequestError, StateError, UpdateError, WeightsError
from penstock.types import (
    KV,
    GenerateBatch,
    GenerateOutput,
    NamedTensors,
    PauseMode,
    Sample,
    SamplingParams,
    SessionId,
    UpdateReport,
)
from penstock.weights.manifest import as_named_tensors
from penstock.weights.shared_memory import SharedMemoryStore

if TYPE_CHECKING:
    import torch


class HTTPEngine(Engine):
    """A running engine server, launched by us or by someone else. Build it with `connect`.

    Plain vLLM is one too. What it cannot do raises `MissingCapabilityError`, which says how it is to be started.
    """

    def __init__(self, control: ControlClient, data: DataClient, info: EngineInfo) -> None:
        self.control = control
        self.data = data
        self._info = info
        self._version = info.weight_version
        self._update: asyncio.Task[UpdateReport] | None = None
        self._store = SharedMemoryStore()
        self._kept = {info.weight_version} if info.kv_kept else set[int]()
        self._kv_stays = True
        """The pause in force left the KV cache as it was, as far as is known here: others may have paused it."""
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
        """Read what the engine says of itself and return it ready for use."""
        history = VersionHistory()
        control = VanillaControl(name or url, url, history=history, api_key=api_key, timeout_s=control_timeout_s)
        try:
            info = await control.info()
        except BaseException:
            await control.close()
            raise
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
        itself = ((control.name, info.capabilities),)
        data.state.unreported = VanillaReplies(lambda: itself, history)
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

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2)."""
        return await self.data.generate_batch(batch)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
    ) -> list[Sample]:
        """Samples of one prompt as one n-way request (R3)."""
        return await self.data.sample(prompt_token_ids, num_samples, sampling_params, session_id)

    async def completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI completions."""
        return await self.data.completion(body, session_id)

    async def chat_completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI chat completions."""
        return await self.data.chat_completion(body, session_id)

    def completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """OpenAI completions, as chunks."""
        return self.data.completion_stream(body, session_id)

    def chat_completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """OpenAI chat completions, as chunks."""
        return self.data.chat_completion_stream(body, session_id)

    @property
    def counters(self) -> Counters:
        """What had to be done so that no request was cut short."""
        return self.data.counters

    async def pause_generation(
        self, mode: PauseMode = PauseMode.KEEP, *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Stop making tokens (R22, R23). Whether it is paused is asked of the engine, which others may pause too."""
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

    async def resume_generation(self) -> None:
        """Go on."""
        self._require("pause", "resume_generation")
        if not await self.control.is_paused():
            raise StateError("generation is not paused; there is nothing to resume")
        await self.control.resume()
        self._kv_stays = True

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
        """VLLM's native /init_weight_transfer_engine (R18)."""
        self._require("weight_transfer", "init_weight_update_communicator")
        await self.control.init_weight_transfer(init_info)

    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """VLLM's native start, update, finish (R18)."""
        self._require("weight_transfer", "update_named_weights")
        if self._kv_stays:
            self._kept.add(version)
        await self.control.native_update(update_info, version=version)
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
        self._update = asyncio.create_task(self._put_in_force(as_named_tensors(named_tensors), target, kv))
        return await asyncio.shield(self._update)

    async def _put_in_force(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], target: int, kv: KV
    ) -> UpdateReport:
        begin = time.perf_counter()
        manifest = await asyncio.to_thread(self._store.publish, target, named_tensors)
        published = time.perf_counter()
        await self.control.prepare_weights(manifest)
        prepared = time.perf_counter()
        if kv == "keep":
            self._kept.add(target)
        try:
            update = await self.control.apply_weights(target, clear_cache=kv == "recompute")
        except PenstockError as error:
            raise UpdateError(f"version {target} did not commit, and the engine must not serve: {error}") from error
        self._store.commit(manifest)
        self._version = target
        end = time.perf_counter()
        seconds = {
            "publish": published - begin,
            "prepare": prepared - published,
            "gate": end - prepared,
            "total": end - begin,
        }
        return UpdateReport(version=target, bytes=manifest.nbytes, seconds=seconds, engines=(update,))

    async def get_num_unfinished_requests(self, index: int | None = None) -> int:
        """Requests running or waiting (R10)."""
        _only(index)
        stats = await self.control.stats()
        return stats.running + stats.waiting

    async def get_cache_usage(self, index: int | None = None) -> float:
        """Fraction of KV blocks in use (R10)."""
        _only(index)
        return (await self.control.stats()).kv_cache_usage

    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """A worker method on every worker (R11)."""
        self._require("rpc", "collective_rpc")
        return await self.control.collective_rpc(method, timeout_s, args, kwargs)

    def _require(self, needed: Capability, operation: str) -> None:
        require(((self.control.name, self._info.capabilities),), needed, operation)

    async def teardown(self) -> None:
        """Close connections and free the published weights; the server itself is its launcher's to end.

        An update under way ends first, within its deadlines.
        """
        if self._update is not None:
            await asyncio.wait((self._update,))
        await self.data.close()
        await self.control.close()
        self._store.close()


def _only(index: int | None) -> None:
    if index not in (None, 0):
        raise RequestError(f"this is one engine: index must be 0 or None, got {index}")
