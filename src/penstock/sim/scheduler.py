"""Continuous batching: who is in the next step, who waits, and who gives up its KV (preemption by recompute)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.sim.blocks import BlockPool
from penstock.sim.config import SimConfig
from penstock.sim.sequence import SimSequence


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: each of `sequences` gets a token; `prefill_tokens` prompt tokens are computed on the way."""

    sequences: tuple[SimSequence, ...]
    prefill_tokens: int


@dataclass(slots=True)
class CacheFigures:
    """Counters since the start, in tokens but for `preemptions`."""

    queries: int = 0
    hits: int = 0
    preemptions: int = 0


class Scheduler:
    """First come, first served; the youngest gives way. Pure: no time, no I/O.

    Args:
        config: limits.
        adapter_of: names the weights of a request's LoRA at this moment.
    """

    def __init__(self, config: SimConfig, adapter_of: Callable[[SimSequence], str]) -> None:
        self.waiting: deque[SimSequence] = deque()
        self.running: list[SimSequence] = []
        self.pool = BlockPool(config.kv_blocks, caching=config.enable_prefix_caching)
        self.figures = CacheFigures()
        self.admitting = True
        """False while paused: what waits goes on waiting."""
        self._config = config
        self._adapter_of = adapter_of

    def __iter__(self) -> Iterator[SimSequence]:
        """All sequences, running and waiting."""
        yield from self.running
        yield from self.waiting

    def add(self, sequence: SimSequence) -> None:
        """A new sequence waits for its turn."""
        self.waiting.append(sequence)

    def remove(self, sequence: SimSequence) -> None:
        """It has ended or was aborted: its blocks are free."""
        if sequence.blocks:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self, version: int) -> StepPlan | None:
        """The next step under weights `version`; None where there is nothing to compute."""
        preempted = self.figures.preemptions
        for sequence in tuple(self.running):
            while sequence.blocks and not self._grow(sequence):
                self.preempt(self.running[-1])
        prefill = 0
        if preempted == self.figures.preemptions and self.admitting:
            prefill = self._admit_waiting(version)
        return StepPlan(tuple(self.running), prefill) if self.running else None

    def preempt(self, sequence: SimSequence) -> None:
        """Take its KV away; it goes to the head of the queue and will be recomputed."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.figures.preemptions += 1

    def preempt_all(self) -> int:
        """Preempt every running sequence, keeping their order; returns how many."""
        count = len(self.running)
        while self.running:
            self.preempt(self.running[-1])
        return count

    def computed(self, sequence: SimSequence) -> None:
        """Its step is done: all tokens but the newest have KV, and the blocks that these fill can be shared."""
        full = (sequence.length - 1) // self._config.block_size
        if sequence.published < full:
            adapter = self._adapter_of(sequence)
            for i in range(sequence.published, full):
                self.pool.publish(sequence.blocks[i], (adapter, *sequence.block_ends[i]))
            sequence.published = full

    def _admit_waiting(self, version: int) -> int:
        budget = self._config.max_num_batched_tokens
        prefill = 0
        while self.waiting and len(self.running) < self._config.max_num_seqs and prefill < budget:
            cost = self._admit(self.waiting[0], version)
            if cost is None:
                break
            prefill += cost
            self.running.append(self.waiting.popleft())
        return prefill

    def _admit(self, sequence: SimSequence, version: int) -> int | None:
        """Give it blocks; returns the tokens left to compute, None where there is no room."""
        adapter = self._adapter_of(sequence)
        # At least the last token is computed, for its output (vLLM: max_cache_hit_length).
        findable = sequence.block_ends[: (sequence.length - 1) // self._config.block_size]
        blocks = self.pool.take_cached([(adapter, *end) for end in findable])
        stale = next((block.version for block in blocks if block.version != version), version)
        fresh = self.pool.allocate(self._needed(sequence) - len(blocks), stale)
        if fresh is None:
            self.pool.release(blocks)
            return None
        hit = len(blocks) * self._config.block_size
        if self._config.enable_prefix_caching and not sequence.counted:
            sequence.counted = True
            sequence.request.cached_tokens = max(sequence.request.cached_tokens, hit)
            self.figures.queries += sequence.length
            self.figures.hits += hit
        sequence.blocks = [*blocks, *fresh]
        sequence.published = len(blocks)
        sequence.kv_version = stale
        return sequence.length - hit

    def _grow(self, sequence: SimSequence) -> bool:
        missing = self._needed(sequence) - len(sequence.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(missing, sequence.kv_version)
        if fresh is None:
            return False
        sequence.blocks.extend(fresh)
        return True

    def _needed(self, sequence: SimSequence) -> int:
        return -(-sequence.length // self._config.block_size)

    def _release(self, sequence: SimSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
