"""The simulated engine without HTTP: what vLLM's API server and scheduler do, in simulated steps.

`SimEngine` pauses, sleeps and wakes up as vLLM does. `Holds` makes of that pauses and sleeps that end no request, and
wake-ups that start none too early, as Penstock's plugin does in vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.engine.partial import Partial
from penstock.errors import EngineDeadError, RequestError
from penstock.sim.adapters import Adapters
from penstock.sim.clock import Clock, LoopClock
from penstock.sim.config import SimConfig
from penstock.sim.faults import Died, FaultKind, FaultPlan, Phase
from penstock.sim.scheduler import Scheduler, SimRequest, SimSequence, StepPlan
from penstock.sim.stats import EngineStats
from penstock.sim.tokens import Weights
from penstock.sim.update import WeightState
from penstock.types import PauseMode, Sample, SamplingParams

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
DROPS_WEIGHTS = 2


class Holds:
    """What holds the generation of one engine; see `plugin/pause.py`."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._paused = False
        self._without_weights = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool, release: bool) -> None:
        """`/pause`; `release`: what is in flight ends with the finish reason `abort`, to go on elsewhere."""
        await self._engine.pause(self._mode(mode, release=release), clear_cache=clear_cache)
        self._paused = True

    async def resume(self) -> None:
        """`/resume`."""
        self._paused = False
        if self._engine.config.plain:
            await self._engine.resume()
        else:
            await self._go_on()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """`/sleep`."""
        await self._engine.sleep(level, self._mode(mode))
        self._without_weights |= level == DROPS_WEIGHTS

    async def wake_up(self, tags: Sequence[str] | None) -> bool:
        """`/wake_up`; returns whether all memory is back."""
        if self._engine.config.plain:
            return await self._engine.wake_up(tags)
        awake = await self._engine.wake_up(tags, resume=False)
        await self._go_on()
        return awake

    def weights_are_out(self) -> None:
        """Nothing may be computed before weights are in."""
        self._without_weights = True

    async def weights_are_in(self) -> None:
        """New weights are in force, and labelled."""
        self._without_weights = False
        if not self._engine.config.plain:
            await self._go_on()

    async def _go_on(self) -> None:
        if not self._paused and not self._engine.asleep and not self._without_weights:
            await self._engine.resume()

    def _mode(self, mode: PauseMode, *, release: bool = False) -> PauseMode:
        ends = release or self._engine.config.plain
        return PauseMode.KEEP if mode is PauseMode.ABORT and not ends else mode


DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""How vLLM words it."""


class SimEngine:
    """One engine. Every method may be called from any task of one event loop; nothing needs to be started.

    Args:
        config: how it is built.
        clock: where its time comes from; default: the running loop's.
        on_death: called once when it dies, with how.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        clock: Clock | None = None,
        on_death: Callable[[FaultKind], None] | None = None,
    ) -> None:
        self.config = config or SimConfig()
        self.clock: Clock = clock or LoopClock()
        self.faults = FaultPlan(self.clock, self.config.faults)
        self.adapters = Adapters(self.config)
        self.weights = WeightState(self)
        self.holds = Holds(self)
        self.scheduler = Scheduler(self.config, lambda s: self.adapters.path(s.request.lora))
        self.stats = EngineStats()
        self.asleep: frozenset[str] = frozenset()
        """What sleep took away: `weights`, `kv_cache`."""
        self.death: str | None = None
        """Why it is dead."""
        self._frozen = False
        self._on_death = on_death
        self._requests: dict[str, SimRequest] = {}
        self._ids = itertools.count()
        self._loop: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        """Between a pause and the next resume."""
        return not self.scheduler.admitting

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        lora: str | None = None,
    ) -> list[Sample]:
        """`n` samples of one prompt.

        Raises:
            RequestError: the request is malformed.
            EngineDeadError: the engine is or was dead.
        """
        request = await self.submit(prompt_ids, SamplingParams.of(params), lora=lora)
        try:
            await request.wait()
        finally:
            self.drop(request)
        return [sequence.sample() for sequence in request.sequences]

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        lora: str | None = None,
        max_tokens: int | None = None,
        parts: Sequence[Partial] = (),
    ) -> SimRequest:
        """Queue a request; wait on what comes back, then `drop` it.

        Args:
            prompt_ids: shape `[P]`.
            params: of all its samples.
            request_id: by which it can be aborted; default: a number.
            lora: name of a loaded adapter.
            max_tokens: limit in place of the one in `params`, which cannot say 0 or "as many as fit".
            parts: what its samples have already.
        """
        await self.at(Phase.REQUEST)
        limit = self._check(prompt_ids, params, max_tokens)
        name = request_id if request_id is not None and request_id not in self._requests else f"req-{next(self._ids)}"
        request = SimRequest(name, tuple(prompt_ids), params, lora=lora, block_size=self.config.block_size)
        request.sequences = [SimSequence(request, i, self.config.model, limit) for i in range(params.n)]
        self._requests[name] = request
        self.stats.prompt_tokens += len(prompt_ids)
        for sequence, part in zip(request.sequences, parts, strict=False):
            sequence.take_up(part)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.scheduler.add(sequence)
        self.kick()
        return request

    def drop(self, request: SimRequest) -> None:
        """Nobody waits for it any more: what is left of it is aborted."""
        self._abort([s for s in request.sequences if s.finish_reason is None])
        self._requests.pop(request.id, None)

    def abort(self, request_ids: Iterable[str] | None = None, *, asked: bool = False) -> int:
        """End requests (None: all) with the tokens they have and the finish reason `abort`; returns how many.

        `asked`: it is for the sake of ending them, and not of a pause.
        """
        chosen = list(self._requests) if request_ids is None else [i for i in request_ids if i in self._requests]
        for request_id in chosen:
            self._requests[request_id].asked = asked
            self._abort([s for s in self._requests[request_id].sequences if s.finish_reason is None])
        return len(chosen)

    # --- pause, resume, memory ----------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True) -> int:
        """Stop making tokens; returns when none is being made, with the number of requests preempted.

        Pausing twice is allowed, as in vLLM; the later mode holds. New requests queue until `resume`.
        """
        await self.at(Phase.PAUSE)
        self._frozen = mode is PauseMode.KEEP
        self.scheduler.admitting = False
        if mode is PauseMode.ABORT:
            self.abort()
        self.kick()
        await self._idle()
        await self.clock.sleep(self.config.pause_seconds)
        self.check_alive()
        return self._clear_cache() if clear_cache else 0

    async def resume(self) -> None:
        """Go on. Does nothing where it was not paused."""
        await self.at(Phase.RESUME)
        await self.clock.sleep(self.config.resume_seconds)
        self.check_alive()
        self._frozen = False
        self.scheduler.admitting = True
        self.kick()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached prefixes. False, and nothing done, while requests hold blocks and may not be recomputed."""
        self.check_alive()
        if reset_running_requests:
            self._clear_cache()
            self.kick()
            return True
        return self.scheduler.pool.reset()

    async def sleep(self, level: int = 1, mode: PauseMode = PauseMode.ABORT) -> None:
        """Pause; from level 1 on weights and KV leave the device."""
        await self.pause(mode, clear_cache=level >= 1)
        if level >= 1:
            self.asleep = frozenset({"weights", "kv_cache"})

    async def wake_up(self, tags: Sequence[str] | None = None, *, resume: bool = True) -> bool:
        """Take memory back; when all is there, go on (`resume`). Returns whether it is."""
        self.check_alive()
        self.asleep = frozenset() if tags is None else self.asleep - set(tags)
        if resume and not self.asleep:
            await self.resume()
        return not self.asleep

    # --- life and death -----------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise EngineDeadError where the engine is dead."""
        if self.death is not None:
            raise EngineDeadError(self.death, engine=self.config.name)

    async def at(self, phase: Phase) -> None:
        """Let the faults set at this phase happen. Raises RefusedError, or EngineDeadError where one of them kills."""
        try:
            await self.faults.at(phase)
        except Died as died:
            self.die(died.kind, f"a fault at {phase.value!r}")
        self.check_alive()

    def die(self, kind: FaultKind, reason: str) -> None:
        """The engine is gone, with every request it had."""
        if self.death is not None:
            return
        self.faults.clear()
        self.death = f"{DEAD} ({kind.value}: {reason})"
        if self._on_death is not None:
            self._on_death(kind)
        for request in self._requests.values():
            request.die(self.death)

    def close(self) -> None:
        """Stop for good; only for an engine that is thrown away before its work is done."""
        if self._loop is not None:
            self._loop.cancel()

    def kick(self) -> None:
        """See to it that steps are made while there is work."""
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
            await self.clock.sleep(self._step_seconds(plan))
            await self._emit(plan)

    def _step_seconds(self, plan: StepPlan) -> float:
        """Time of a step: a floor set by reading the weights, a slope in the batch, and the prompt tokens computed."""
        config = self.config
        decode = 1 / config.tokens_per_second + config.sequence_seconds * (len(plan.sequences) - 1)
        return self.faults.slow_factor * (decode + plan.prefill_tokens / config.prefill_tokens_per_second)

    async def _emit(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            # Aborted or preempted while the step ran: its token is dropped, as vLLM drops stale output.
            if self.death is not None or sequence.finish_reason is not None or not sequence.blocks:
                continue
            adapter = self.adapters.path(sequence.request.lora)
            weights = Weights(self.weights.identity, sequence.kv_version, adapter)
            sequence.advance(weights, self.weights.label)
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

    async def _idle(self) -> None:
        if self._loop is not None and not self._loop.done():
            await asyncio.wait({self._loop})

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
        """The number of tokens it may make. Raises RequestError."""
        config = self.config
        if not prompt_ids:
            raise RequestError("The decoder prompt cannot be empty")
        for token in (min(prompt_ids), max(prompt_ids)):
            if not 0 <= token < config.vocab_size:
                raise RequestError(f"Token id {token} is out of vocabulary")
        room = config.max_model_len - len(prompt_ids)
        wanted = params.max_tokens if max_tokens is None else max_tokens
        if room < 1:
            raise RequestError(
                f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains "
                f"{len(prompt_ids)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
        if wanted > room and config.context_overflow == "refuse" and max_tokens is None:
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
