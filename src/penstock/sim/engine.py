"""The simulated engine without HTTP: the work of vLLM's API server and scheduler, in simulated steps.

Unless `SimConfig.plain` is set, it pauses and wakes up as vLLM with Penstock's plugin (`plugin/pause.py`). A pause ends
no request. A wake-up resumes only if no pause was requested and the weights are complete.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from penstock.control_types import KV, PauseMode, TokenLoss
from penstock.errors import EngineDeadError, RequestError, StateError
from penstock.plugin.steps import Steps
from penstock.plugin.token_meter import TokenMeter
from penstock.sim.config import Died, FaultKind, FaultPlan, Phase, SimConfig
from penstock.sim.scheduler import Listener, Scheduler, SimRequest, SimSequence, StepPlan
from penstock.sim.tokens import Weights
from penstock.sim.update import Adapters, WeightState, check_manifest, checksum_of, content_of, receive_broadcast
from penstock.types import SamplingParams
from penstock.weights.broadcast import TRANSPORT as BROADCAST
from penstock.weights.manifest import WeightManifest
from penstock.wire import Notes

DROPS_WEIGHTS = 2
"""The sleep level that discards the weights."""
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""vLLM's own error message."""


class SimEngine:
    """One engine. Any task of one event loop may call its methods. It needs no start.

    The engine calls `on_death` once when it dies, with the kind of death.
    """

    def __init__(self, config: SimConfig | None = None, *, on_death: Callable[[FaultKind], None] | None = None) -> None:
        self.config = config or SimConfig()
        self.instance = uuid4().hex
        """Id that no other engine has."""
        self.faults = FaultPlan(self.config.faults)
        self.adapters = Adapters(self.config)
        self.weights = WeightState()
        self.scheduler = Scheduler(self.config, lambda s: self.adapters.content(s.request.lora))
        self.stats = self.scheduler.stats
        self.step_counts = Steps(lambda: asyncio.get_running_loop().time())
        self.meter = TokenMeter(self.step_counts)
        self.asleep: frozenset[str] = frozenset()
        """Memory that a sleep released: `weights`, `kv_cache`."""
        self.death: str | None = None
        """Reason of the death; None while the engine lives."""
        self._frozen = False
        self._pause_requested = False
        self._without_weights = False
        """Whether the weights are incomplete, so that no token may be computed."""
        self._on_death = on_death
        self._requests: dict[str, SimRequest] = {}
        self._ids = itertools.count()
        self._loop: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        return not self.scheduler.admitting

    # --- generation ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        listener: Listener,
        *,
        request_id: str | None = None,
        lora: str | None = None,
        max_tokens: int | None = None,
        parts: Sequence[Mapping[str, Any]] = (),
    ) -> SimRequest:
        """Queue a request. The caller awaits its end, and then calls `drop`.

        `listener` gets the request's new tokens, and None at its end. `max_tokens` replaces the limit of `params`,
        which cannot express 0 or "as many as fit". `parts` holds the tokens that the samples already have.
        """
        await self.at(Phase.REQUEST)
        limit = self._check(prompt_ids, params, max_tokens)
        name = request_id if request_id is not None and request_id not in self._requests else f"req-{next(self._ids)}"
        request = SimRequest(name, tuple(prompt_ids), params, listener, lora=lora, block_size=self.config.block_size)
        request.sequences = [SimSequence(request, i, self.config.model, limit) for i in range(params.n)]
        self._requests[name] = request
        self.stats.prompt_tokens += len(prompt_ids)
        self.adapters.note_use(lora)
        for sequence, part in zip(request.sequences, parts, strict=False):
            sequence.resume(part)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.scheduler.add(sequence)
        self.kick()
        return request

    def drop(self, request: SimRequest) -> None:
        """Abort the unfinished sequences of a request, and forget the request."""
        self._abort([s for s in request.sequences if s.finish_reason is None])
        self._requests.pop(request.id, None)

    def abort(self, request_ids: Iterable[str] | None = None, *, asked: bool = False) -> int:
        """End requests (None: all) with their tokens, as `abort`. Return how many.

        `asked`: a client asked for the abort, so the requests do not continue elsewhere.
        """
        chosen = list(self._requests) if request_ids is None else [i for i in request_ids if i in self._requests]
        for request_id in chosen:
            self._requests[request_id].asked = asked
            self._abort([s for s in self._requests[request_id].sequences if s.finish_reason is None])
        return len(chosen)

    # --- pause, resume, memory ----------------------------------------------------------------------------------------

    async def pause(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True, release: bool = False
    ) -> None:
        """`/pause`: return once no token is being made. New requests then queue.

        A second pause is allowed, as in vLLM; the later mode applies. With `release` (or in plain vLLM) the mode
        `abort` ends requests, so that they continue on another engine. Otherwise they wait on this engine.
        """
        self.meter.close()
        await self._stop(self._stop_mode(mode, release=release), clear_cache=clear_cache)
        self._pause_requested = True

    async def resume(self) -> None:
        """`/resume`."""
        self._pause_requested = False
        if self.config.plain:
            await self._resume()
        else:
            await self._resume_if_ready()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes. Change nothing and return False if requests hold blocks and may not be recomputed."""
        self.check_alive()
        if reset_running_requests:
            self._clear_cache()
            self.kick()
            return True
        return self.scheduler.pool.reset()

    async def sleep(self, level: int = 1, mode: PauseMode = PauseMode.ABORT) -> None:
        """`/sleep`: pause. From level 1 on, weights and KV leave the device."""
        self.meter.close()
        await self._stop(self._stop_mode(mode), clear_cache=level >= 1)
        if level >= 1:
            self.asleep = frozenset({"weights", "kv_cache"})
        self._without_weights |= level == DROPS_WEIGHTS

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """`/wake_up`: take memory back, and resume once all is back. Return whether it is."""
        self.check_alive()
        self.asleep = frozenset() if tags is None else self.asleep - set(tags)
        if not self.config.plain:
            await self._resume_if_ready()
        elif not self.asleep:
            await self._resume()
        return not self.asleep

    def _stop_mode(self, mode: PauseMode, *, release: bool = False) -> PauseMode:
        ends_requests = release or self.config.plain
        return PauseMode.KEEP if mode is PauseMode.ABORT and not ends_requests else mode

    async def _stop(self, mode: PauseMode, *, clear_cache: bool) -> int:
        """Stop as vLLM does. Return the number of preempted sequences."""
        await self.at(Phase.PAUSE)
        self._frozen = mode is PauseMode.KEEP
        self.scheduler.admitting = False
        if mode is PauseMode.ABORT:
            self.abort()
        self.kick()
        if self._loop is not None and not self._loop.done():
            await asyncio.wait({self._loop})
        self.check_alive()
        return self._clear_cache() if clear_cache else 0

    async def _resume(self) -> None:
        await self.at(Phase.RESUME)
        self._frozen = False
        self.scheduler.admitting = True
        self.meter.resume()
        self.kick()

    async def _resume_if_ready(self) -> None:
        if not self._pause_requested and not self.asleep and not self._without_weights:
            await self._resume()

    # --- adapters -----------------------------------------------------------------------------------------------------

    async def read_adapter(self, source: Mapping[str, Any]) -> None:
        """Read an adapter while generating. UserError: it is unreadable."""
        self.check_alive()
        content_of(source)

    async def load_adapter(
        self, name: str, version: int, source: Mapping[str, Any], kv: KV = "recompute"
    ) -> dict[str, Any]:
        """Put an adapter's version in force. Its requests are recomputed or keep KV.

        Raises:
            UserError: there is no room, or the source is unreadable. The engine is unchanged.
        """
        await self.at(Phase.CONTROL)
        self.adapters.load(name, content_of(source), version=version)
        if not self.paused:
            self.meter.begin((name, version), len(self.scheduler.running))
            self.meter.resume()  # the simulated load takes no time
        running = [sequence for sequence in self.scheduler.running if sequence.request.lora == name]
        for sequence in reversed(running):
            if kv == "recompute":
                self.scheduler.preempt(sequence)
            else:
                sequence.kv_kept = True
        self.kick()
        seconds = dict.fromkeys(("pause", "load", "resume", "bubble"), 0.0)
        preempted = len(running) if kv == "recompute" else 0
        return {"version": version, "seconds": seconds, "preempted": preempted, "kept": len(running) - preempted}

    async def change_adapter(self, name: str, change: Literal["unload", "pause", "resume"]) -> None:
        """Forget an adapter, or hold all its requests until `resume`. Repeating a change is harmless.

        Raises:
            StateError: the adapter is to be unloaded but has requests in flight.
        """
        await self.at(Phase.CONTROL)
        if change == "pause":
            self.scheduler.hold(name)
            return
        if change == "unload":
            if count := self._in_flight(name):
                raise StateError(f"adapter {name!r} has {count} requests in flight; unload it when they have ended")
            self.adapters.forget(name)
        self.scheduler.release(name)
        self.kick()

    def adapters_served(self) -> dict[str, dict[str, Any]]:
        """Return each adapter's version, requests in flight, and idle seconds."""
        return {name: self.adapters.served(name, self._in_flight(name)) for name in self.adapters.loaded}

    def _notes_of(self, sequence: SimSequence) -> Notes | None:
        notes = self.adapters.notes(sequence.request.lora)
        return (notes | {"kv_kept": True} if sequence.kv_kept else notes) or None

    def _in_flight(self, name: str) -> int:
        return sum(sequence.request.lora == name for sequence in self.scheduler)

    # --- weights: Penstock's updates ----------------------------------------------------------------------------------

    async def prepare(self, manifest: WeightManifest) -> None:
        """Check an offered version while generating. Change nothing in force.

        Raises:
            WeightsError: the version does not fit.
        """
        await self.at(Phase.PREPARE)
        if manifest.transport == BROADCAST:
            self.weights.group.prepare(manifest)
        self.weights.prepared = (manifest, check_manifest(manifest, self.config.tensor_specs))

    async def apply(self, version: int, *, kv: KV = "recompute") -> dict[str, Any]:
        """Pause (keep), load the prepared version, label it, resume. An engine that was paused stays paused.

        Returns:
            `version`, `seconds` of each phase, `preempted`, `kept`, `checksum`, as in the answer of Penstock's plugin.

        Raises:
            StateError: that version was not prepared. The engine is unchanged.
            TransferError: bytes are missing. The engine stays paused until it has received a whole version.
        """
        prepared = self.weights.prepared
        if prepared is None or prepared[0].version != version:
            has = "none is" if prepared is None else f"{prepared[0].version} is"
            raise StateError(f"weight version {version} was not prepared ({has}); call prepare first")
        self.weights.prepared = None
        now = asyncio.get_running_loop().time
        begin = now()
        if not self.paused:
            self.meter.begin(version, len(self.scheduler.running))
        preempted = await self._stop(PauseMode.KEEP, clear_cache=kv == "recompute")
        kept = self.scheduler.keep_in_flight(version) if kv == "keep_in_flight" else len(self.scheduler.running)
        paused = now()
        self._without_weights = True
        checksum = await self._load(*prepared)
        self.weights.kv_kept = version if kv == "keep" else None
        loaded = now()
        await self._weights_complete()
        end = now()
        seconds = {"pause": paused - begin, "load": loaded - paused, "resume": end - loaded, "bubble": end - begin}
        requests = {"preempted": preempted, "kept": kept}
        return {"version": version, "seconds": seconds, **requests, "checksum": checksum}

    async def token_loss(self, version: int, adapter: str | None, timeout_s: float) -> TokenLoss | None:
        """Return an update's cost once known, or its cost so far after `timeout_s`."""
        if (loss := self.meter.loss(version if adapter is None else (adapter, version))) is None:
            return None
        known = asyncio.wrap_future(loss)
        if not (await asyncio.wait((known,), timeout=timeout_s))[0]:
            self.meter.close()
        return await known

    async def _load(self, manifest: WeightManifest, checksum: str) -> str:
        weights, version = self.weights, manifest.version
        weights.unfit = f"loading version {version} did not end"
        await self.at(Phase.LOAD)
        await asyncio.sleep(self.config.load_seconds)
        if manifest.transport == BROADCAST:
            checksum = checksum_of(await receive_broadcast(weights.group, manifest))
        self.check_alive()
        weights.unfit, weights.identity, weights.checksum = None, version, checksum
        if self.faults.take(Phase.LOAD, FaultKind.WRONG_LABEL) is None:
            weights.label = str(version)
        wrong = self.faults.take(Phase.LOAD, FaultKind.WRONG_CHECKSUM)
        return checksum if wrong is None else checksum[::-1]

    async def _weights_complete(self) -> None:
        self._without_weights = False
        if not self.config.plain:
            await self._resume_if_ready()

    # --- weights: vLLM's updates --------------------------------------------------------------------------------------

    def start_update(self) -> None:
        """`/start_weight_update`. During requests it kills the engine, as in vLLM.

        Raises:
            StateError: the transfer engine is not initialised, or an update is under way.
            EngineDeadError: the engine was not paused.
        """
        self.check_alive()
        self.weights.start()
        if self.scheduler.running and not self.paused:
            self.die(FaultKind.CORE_DEATH, "start_weight_update while requests run")
            self.check_alive()

    async def update_weights(self) -> None:
        """`/update_weights`. A failure leaves the engine unfit. StateError: `start_update` was not called."""
        self.check_alive()
        self.weights.started("update_weights")
        await self.at(Phase.LOAD)
        await asyncio.sleep(self.config.load_seconds)
        self.check_alive()
        self.weights.update()

    async def finish_update(self, label: str | None) -> None:
        """`/finish_weight_update`: put the weights in force, with a label if one is given."""
        self.check_alive()
        self.weights.finish(label)
        await self._weights_complete()

    # --- life and death -----------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        if self.death is not None:
            raise EngineDeadError(self.death, engine=self.config.name)

    async def at(self, phase: Phase) -> None:
        """Apply the faults of this phase. Raises RefusedError, or EngineDeadError if a fault kills."""
        try:
            await self.faults.at(phase)
        except Died as died:
            self.die(died.kind, f"a fault at {phase.value!r}")
        self.check_alive()

    def die(self, kind: FaultKind, reason: str) -> None:
        if self.death is not None:
            return
        self.faults.clear()
        self.death = f"{DEAD} ({kind.value}: {reason})"
        if self._on_death is not None:
            self._on_death(kind)
        for request in self._requests.values():
            request.die()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()

    def kick(self) -> None:
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._steps(), name=f"{self.config.name}-steps")

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        while self.death is None and not self._frozen:
            plan = self.scheduler.plan(self.weights.identity)
            if plan is None:
                return
            if self.weights.unfit is not None:
                self.die(FaultKind.CORE_DEATH, f"generation on unfit weights: {self.weights.unfit}")
                return
            await asyncio.sleep(self._step_seconds(plan))
            await self._emit(plan)

    def _step_seconds(self, plan: StepPlan) -> float:
        """Return a step's seconds: a floor for reading the weights, plus time per sample and prompt token."""
        config = self.config
        decode = 1 / config.tokens_per_second + config.sequence_seconds * (len(plan.sequences) - 1)
        return self.faults.slow_factor * (decode + plan.prefill_tokens / config.prefill_tokens_per_second)

    async def _emit(self, plan: StepPlan) -> None:
        made = 0
        for sequence in plan.sequences:
            # Aborted or preempted while the step ran: drop its token, as vLLM drops stale output.
            if self.death is not None or sequence.finish_reason is not None or not sequence.blocks:
                continue
            adapter = self.adapters.content(sequence.request.lora)
            weights = Weights(self.weights.identity, sequence.kv_version, adapter)
            sequence.advance(weights, self.weights.label, self._notes_of(sequence))
            made += 1
            self.scheduler.computed(sequence)
            self.stats.generation_tokens += 1
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
                self.stats.finished[sequence.finish_reason] += 1
            if self.faults.made_token():
                try:
                    await self.at(Phase.TOKENS)
                except EngineDeadError:
                    return
        self.step_counts.count(made, len(self.scheduler.running) + len(self.scheduler.waiting))

    def _abort(self, sequences: Sequence[SimSequence]) -> None:
        for sequence in sequences:
            self.scheduler.remove(sequence)
            self.stats.finished["abort"] += 1
            sequence.finish("abort")

    def _clear_cache(self) -> int:
        preempted = self.scheduler.preempt_all()
        self.scheduler.pool.reset()
        return preempted

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int | None) -> int:
        """Return the number of tokens that a request may make. Raises RequestError."""
        config = self.config
        if not prompt_ids:
            raise RequestError("The decoder prompt cannot be empty")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < config.vocab_size:
                raise RequestError(f"Token id {token} is out of vocabulary")
        room = config.max_model_len - len(prompt_ids)
        wanted = params.max_tokens if max_tokens is None else max_tokens
        if room < 1 or (wanted > room and max_tokens is None):
            raise RequestError(
                f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
                f"{wanted} output tokens and your prompt contains {len(prompt_ids)} input tokens, for a total of "
                f"{wanted + len(prompt_ids)} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens."
            )
        if params.n > config.max_num_seqs:
            raise RequestError(
                f"sampling_params.n must be at most the server's max_num_seqs ({config.max_num_seqs}), got {params.n}."
            )
        return min(wanted, room)
