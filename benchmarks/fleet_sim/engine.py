"""One vLLM engine as a discrete-event model: what happens between arrivals, finished prefills and ends is arithmetic.

All running sequences get one token a step, so they share one axis of steps: a sequence ends when the engine reaches
the position that was known when it began to decode. The engine therefore wakes only when a sequence ends, when a
prefill is in the step, when KV runs out, or at the end of the step in which somebody arrived. The rules are those of
vLLM's scheduler (v1): running sequences first, then first come first served within the token budget, prompts in chunks
where that is on; where KV runs out the youngest gives way and is recomputed, prefix cache permitting.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from fleet_sim.cache import Segment, SegmentCache
from fleet_sim.speed import EngineLimits, EngineSpeed
from penstock.errors import RequestError


class FleetSequence:
    """One completion in an engine.

    Args:
        chain: segments of the prompt; the last is its own and takes in what is generated.
        output_tokens: how many it will generate, at least 1.
        tag: the caller's.
    """

    __slots__ = ("before", "chain", "end", "hit", "left", "made", "output_tokens", "prompt", "start", "tag")

    def __init__(self, chain: Sequence[Segment], output_tokens: int, tag: object = None) -> None:
        self.chain = tuple(chain)
        self.output_tokens = output_tokens
        self.tag = tag
        self.prompt = sum(tokens for _, tokens in self.chain)
        """Tokens to have KV before it decodes: the prompt, and what it had made before a preemption."""
        self.hit = -1
        """Prompt tokens found in the prefix cache; -1 before it was scheduled for the first time."""
        self.made = 0
        """Tokens generated, up to the start of its present run."""
        self.left = 0
        """Prompt tokens still to be computed."""
        self.before = 0
        """Prompt tokens that have KV."""
        self.start = -1
        """Position at which it began to decode in this run; -1: it has not."""
        self.end = -1
        """Position at which it ends."""


class EngineCounters:
    """Sums since the start, in tokens but for the last two."""

    __slots__ = ("busy_s", "generated", "hits", "preemptions", "prefilled", "queries")

    def __init__(self) -> None:
        self.queries = 0
        """Prompt tokens of requests, each request once."""
        self.hits = 0
        """Of these, found in the prefix cache."""
        self.prefilled = 0
        """Prompt tokens computed, again after a preemption too."""
        self.generated = 0
        self.preemptions = 0
        self.busy_s = 0.0


class FleetEngine:
    """An engine. The caller keeps the time: after each call it looks at `wake`, and calls `advance` then.

    Args:
        name: for the router.
        speed: what a step costs.
        limits: vLLM's options.
    """

    def __init__(self, name: str, speed: EngineSpeed, limits: EngineLimits) -> None:
        self.name = name
        self.speed = speed
        self.limits = limits
        self.wake = math.inf
        """When `advance` is due."""
        self.slowness = 1.0
        """Every step takes so many times its time; takes effect with the next phase."""
        self.cache = SegmentCache(limits.kv_tokens, limits.block_size, caching=limits.enable_prefix_caching)
        self.counters = EngineCounters()
        self.waiting: deque[FleetSequence] = deque()
        self.running: dict[FleetSequence, None] = {}
        """In order of admission."""
        self._prefilling: deque[FleetSequence] = deque()
        self._finishing: list[tuple[int, int, FleetSequence]] = []
        self._position = 0
        self._context = 0
        """Sum of the lengths of the sequences that decode."""
        self._decoding = 0
        self._pending_s = 0.0
        """Host work of the requests that this step admits."""
        self._phase_start = 0.0
        self._phase_steps = 0
        self._chunks: list[tuple[FleetSequence, int]] = []
        self._tie = 0
        self._half_block = limits.block_size // 2

    @property
    def kv_usage(self) -> float:
        """Share of KV in use by running sequences, 0 to 1; vLLM's `kv_cache_usage_perc`."""
        return self.cache.pinned / self.cache.capacity

    @property
    def outstanding(self) -> int:
        """Sequences in it."""
        return len(self.running) + len(self.waiting)

    def submit(self, sequence: FleetSequence, now: float) -> None:
        """A request arrives.

        Raises:
            RequestError: it can never fit.
        """
        total = sequence.prompt + sequence.output_tokens
        if total + self.limits.block_size > self.cache.capacity or sequence.output_tokens < 1 or sequence.prompt < 1:
            raise RequestError(
                f"a sequence of {sequence.prompt} + {sequence.output_tokens} tokens does not fit engine {self.name}, "
                f"whose KV holds {self.cache.capacity}; give limits.kv_tokens more room, and at least one token of each"
            )
        blocked = bool(self.waiting) or len(self.running) >= self.limits.max_num_seqs
        self.waiting.append(sequence)
        if math.isinf(self.wake):
            self._begin(now)
        elif not blocked and not self._chunks and self._phase_steps > 1:
            elapsed = max(0.0, now - self._phase_start) / self.slowness
            steps = self.speed.steps_within(elapsed, self._decoding, self._context)
            if steps < self._phase_steps:
                self._plan(steps)

    def advance(self, now: float) -> list[FleetSequence]:
        """The phase is over; returns the sequences that ended with it."""
        self.counters.busy_s += now - self._phase_start
        steps = self._phase_steps
        self._position += steps
        self._context += self._decoding * steps
        self.cache.grow(self._decoding * steps)
        self.counters.generated += self._decoding * steps
        self._compute_chunks()
        ended: list[FleetSequence] = []
        heap = self._finishing
        while heap and heap[0][0] <= self._position:
            end, _, sequence = heapq.heappop(heap)
            if sequence.end == end and sequence in self.running:
                self._leave(sequence, end - sequence.start)
                ended.append(sequence)
        self._begin(now)
        return ended

    def kill(self) -> list[FleetSequence]:
        """It dies; returns the sequences that were in it, oldest first."""
        lost = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self._prefilling.clear()
        self._finishing.clear()
        self._chunks.clear()
        self.cache.clear()
        self._context = self._decoding = 0
        self.wake = math.inf
        return lost

    # --- one step's plan ----------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Decide what the next phase is; the engine is at the end of a step."""
        self._phase_start = now
        if not self._make_room() and self.waiting:
            self._admit()
        self._chunks = self._next_chunks()
        if self._chunks:
            self._plan(1)
        elif self._decoding:
            room = self._free() // self._decoding
            heap = self._finishing
            while heap[0][2].end != heap[0][0] or heap[0][2] not in self.running:
                heapq.heappop(heap)
            self._plan(max(1, min(heap[0][0] - self._position, room)))
        else:
            self.wake = math.inf

    def _plan(self, steps: int) -> None:
        self._phase_steps = steps
        seconds = self.speed.decode(steps, self._decoding, self._context)
        for sequence, tokens in self._chunks:
            seconds += self.speed.prefill(tokens, sequence.before) + self.speed.sequence_s
        self.wake = self._phase_start + (seconds + self._pending_s) * self.slowness

    def _free(self) -> int:
        """Tokens of KV that no sequence has; every running one leaves half a block empty on average."""
        return self.cache.capacity - self.cache.pinned - self._half_block * len(self.running)

    def _make_room(self) -> bool:
        """Preempt the youngest until every decoding sequence has room for its next token; whether any was."""
        preempted = False
        while self._decoding and self._free() < self._decoding and len(self.running) > 1:
            sequence = next(reversed(self.running))
            grown = self._position - sequence.start if sequence.start >= 0 else 0
            self._leave(sequence, grown)
            if sequence.start >= 0:
                made = grown + 1
                sequence.made += made
                key, tokens = sequence.chain[-1]
                sequence.chain = (*sequence.chain[:-1], (key, tokens + made))
                sequence.prompt += made
                sequence.start = sequence.end = -1
            self.waiting.appendleft(sequence)
            self.counters.preemptions += 1
            preempted = True
        return preempted

    def _leave(self, sequence: FleetSequence, grown: int) -> None:
        del self.running[sequence]
        self.cache.release(sequence.chain, grown)
        if sequence.start >= 0:
            self._decoding -= 1
            self._context -= sequence.prompt + grown
        else:
            self._prefilling.remove(sequence)

    def _admit(self) -> None:
        limits = self.limits
        budget = limits.max_num_batched_tokens - self._decoding
        budget -= sum(sequence.left for sequence in self._prefilling)
        self.cache.trim()
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            sequence = self.waiting[0]
            hit = self.cache.hit(sequence.chain)
            missing = sequence.prompt - hit
            if not limits.enable_chunked_prefill and missing > budget and self._prefilling:
                break
            if not self.cache.pin(sequence.chain, self._decoding + self._half_block * (len(self.running) + 1)):
                break
            self.waiting.popleft()
            self.running[sequence] = None
            self._prefilling.append(sequence)
            sequence.left, sequence.before = missing, hit
            budget -= missing
            if sequence.hit < 0:
                sequence.hit = hit
                self._pending_s += self.speed.request_s
                self.counters.queries += sequence.prompt
                self.counters.hits += hit

    def _next_chunks(self) -> list[tuple[FleetSequence, int]]:
        """What the next step computes of prompts: all that fits its budget, and no less than one prompt unchunked."""
        budget = max(1, self.limits.max_num_batched_tokens - self._decoding)
        chunks: list[tuple[FleetSequence, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            tokens = min(sequence.left, budget) if self.limits.enable_chunked_prefill else sequence.left
            chunks.append((sequence, tokens))
            budget -= tokens
        return chunks

    def _compute_chunks(self) -> None:
        """The step is done: prompts that are complete have made their first token."""
        self._pending_s = 0.0
        for sequence, tokens in self._chunks:
            sequence.left -= tokens
            sequence.before += tokens
            self.counters.prefilled += tokens
            if sequence.left:
                continue
            self._prefilling.popleft()  # chunks are in this queue's order, and only the last may be a part
            sequence.start = self._position
            sequence.end = self._position + sequence.output_tokens - sequence.made - 1
            self._decoding += 1
            self.counters.generated += 1
            self._context += sequence.prompt
            self._tie += 1
            heapq.heappush(self._finishing, (sequence.end, self._tie, sequence))
        self._chunks = []
