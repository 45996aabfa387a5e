"""Continuous batching: requests, their sequences, KV blocks with a prefix cache, and the next step's batch.

Blocks are counted as in vLLM. A sequence that gets no block preempts the youngest one, which is recomputed later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from penstock.sim.config import SimConfig
from penstock.sim.tokens import Model, Prefix, Weights, banned_before_min, decode, expected_logprob, expected_token
from penstock.types import FinishReason, SamplingParams
from penstock.wire import INITIAL_VERSION, Notes, add_stretch

Key = tuple[int, str, int, int]
"""Names the tokens up to the end of a block: salt, adapter, number of tokens and their CRC-32."""


@dataclass(slots=True, eq=False)
class Block:
    """`block_size` tokens of KV."""

    version: int
    """Version of the weights that computed it."""
    key: Key | None = None
    """Set once the block is full and can be found."""
    refs: int = 1


class BlockPool:
    """A fixed number of blocks, in use or free. A free block can be found until its room is needed (LRU)."""

    def __init__(self, size: int, *, caching: bool) -> None:
        self.size = size
        self._caching = caching
        self._used = 0
        self._found: dict[Key, Block] = {}
        self._idle: OrderedDict[Key, Block] = OrderedDict()

    @property
    def usage(self) -> float:
        """Fraction of blocks in use, 0 to 1."""
        return self._used / self.size

    def take_cached(self, keys: Sequence[Key]) -> list[Block]:
        """Take the longest cached run from the start of `keys` for the caller."""
        hits: list[Block] = []
        for key in keys:
            block = self._found.get(key)
            if block is None:
                break
            if block.refs == 0:
                del self._idle[key]
                self._used += 1
            block.refs += 1
            hits.append(block)
        return hits

    def allocate(self, count: int, version: int) -> list[Block] | None:
        """Return `count` fresh blocks; None, without a change, if there is no room."""
        if self._used + count > self.size:
            return None
        self._used += count
        while self._used + len(self._idle) > self.size:
            key, _ = self._idle.popitem(last=False)
            del self._found[key]
        return [Block(version) for _ in range(count)]

    def publish(self, block: Block, key: Key) -> None:
        """Let others share a full block, unless another has its key."""
        if self._caching and block.key is None and key not in self._found:
            block.key = key
            self._found[key] = block

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back the caller's use of blocks. Tail blocks are evicted first, as in vLLM."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                self._used -= 1
                if block.key is not None:
                    self._idle[block.key] = block

    def reset(self) -> bool:
        """Forget all cached blocks. While blocks are in use, return False instead."""
        if self._used:
            return False
        self._found.clear()
        self._idle.clear()
        return True


@dataclass(frozen=True, slots=True)
class Delta:
    """New output tokens `[start, end)` of a sequence; `finished` if they are its last."""

    sequence: SimSequence
    start: int
    end: int
    finished: bool


Listener = Callable[[Delta | None], object]


class SimSequence:
    """One sample in progress. The scheduler moves it, and `advance` makes its next token."""

    def __init__(self, request: SimRequest, index: int, model: Model, max_tokens: int) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.prefix = request.prefix
        self.block_ends = list(request.block_ends)
        """Length and CRC-32 of the tokens up to the end of each block that prompt and output fill."""
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[list[Any]] = []
        """For each run of tokens: vLLM's version label, the number of tokens, and `Notes` if there are any."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.text_end: int | None = None
        """Position at which a stop string cut the text."""
        self.blocks: list[Block] = []
        self.published = 0
        """Number of its blocks that others can find."""
        self.kv_version = 0
        self.salt: tuple[int, str] = (0, "")
        """Salt of its blocks: the scheduler's salt, and its adapter's content, both at its admission."""
        self.kv_kept = False
        """Whether it continued with KV of older weights."""
        self.counted = False
        """Whether the prefix cache's counters already include its prompt."""
        self._model = model
        self._max_tokens = max_tokens
        base = model.seed if params.seed is None else params.seed
        self._seed = None if params.temperature == 0 else base + index
        self._banned = banned_before_min(model, params)

    def resume(self, part: Mapping[str, Any]) -> None:
        """Start with the tokens of another engine, which `plugin.resume.check_part` has checked."""
        for token in part["ids"]:
            self._append(token)
        self.logprobs = part["logprobs"] or [0.0] * len(self.output)
        stretches = part["versions"]
        self.versions = [[INITIAL_VERSION if version == 0 else str(version), *rest] for version, *rest in stretches]
        self.finish_reason, self.stop_reason = part["finish"], part["stop_reason"]
        if isinstance(self.stop_reason, str):
            self.text_end = len(self.text) - len(self.stop_reason)
        if self.output or self.finish_reason is not None:
            self.request.changed(self, 0)

    @property
    def length(self) -> int:
        return self.prefix.length

    def made(self, delta: Delta | None) -> tuple[int, int]:
        """Return start and end of a delta's tokens in the output; None: of all tokens."""
        return (0, len(self.output)) if delta is None else (delta.start, delta.end)

    @property
    def text(self) -> str:
        """Decoded output, without EOS and a final stop token, cut at a stop string."""
        ids = self.output
        if self.finish_reason == "stop" and isinstance(self.stop_reason, int):
            ids = ids[:-1]
        return decode(ids, self._model.eos_token_id)[: self.text_end]

    def advance(self, weights: Weights, label: Any, notes: Notes | None = None) -> None:
        """Make the next token under `weights`, labelled `label`. It may be the last."""
        params = self.request.params
        position = len(self.output)
        banned = self._banned if position < params.min_tokens else ()
        token = expected_token(self._model, self.prefix, weights, seed=self._seed, banned=banned)
        self.logprobs.append(expected_logprob(self.prefix, token, weights, temperature=params.temperature))
        self._append(token)
        add_stretch(self.versions, label, 1, notes)
        self._stop(token, params)

    def finish(self, reason: FinishReason) -> None:
        """End the sequence with its tokens so far, for a reason from outside."""
        self.finish_reason = reason
        self.request.changed(self, len(self.output))

    def _append(self, token: int) -> None:
        self.output.append(token)
        self.prefix = self.prefix.then(token)
        if self.prefix.length % self.request.block_size == 0:
            self.block_ends.append((self.prefix.length, self.prefix.crc))

    def _stop(self, token: int, params: SamplingParams) -> None:
        count = len(self.output)
        if count >= params.min_tokens:
            if token == self._model.eos_token_id and not params.ignore_eos:
                self.finish_reason = "stop"
            elif token in params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif params.stop:
                self._stop_at_string(params.stop)
        if self.finish_reason is None and count >= self._max_tokens:
            self.finish_reason = "length"
        self.request.changed(self, count - 1)

    def _stop_at_string(self, stops: tuple[str, ...]) -> None:
        # A token adds at most one character, so a new stop string ends here.
        tail = decode(self.output[-max(map(len, stops)) :], self._model.eos_token_id)
        for stop in stops:
            if tail.endswith(stop):
                self.text_end = len(self.text) - len(stop)
                self.finish_reason, self.stop_reason = "stop", stop
                return


class SimRequest:
    """One prompt and its `n` sequences. `listener` gets the new tokens, and None at the end."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        listener: Listener,
        *,
        lora: str | None,
        block_size: int,
    ) -> None:
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.block_size = block_size
        self.prefix, self.block_ends = _fold(prompt_ids, block_size)
        self.params = params
        self.lora = lora
        """Name of the requested adapter."""
        self.sequences: list[SimSequence] = []
        self.asked = False
        """Whether a client asked for the abort."""
        self._unfinished = params.n
        self._listener = listener

    def changed(self, sequence: SimSequence, start: int) -> None:
        """Report new tokens of a sequence from `start` on, or its end."""
        ended = sequence.finish_reason is not None
        self._listener(Delta(sequence, start, len(sequence.output), ended))
        if ended:
            self._unfinished -= 1
            if not self._unfinished:
                self._listener(None)

    def die(self) -> None:
        """Report the end of the request: its engine is dead."""
        self._listener(None)


def _fold(token_ids: tuple[int, ...], block_size: int) -> tuple[Prefix, list[tuple[int, int]]]:
    prefix, ends = Prefix(), list[tuple[int, int]]()
    for start in range(0, len(token_ids), block_size):
        prefix = prefix.extend(token_ids[start : start + block_size])
        if prefix.length % block_size == 0:
            ends.append((prefix.length, prefix.crc))
    return prefix, ends


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Each of `sequences` gets a token, and `prefill_tokens` prompt tokens are computed."""

    sequences: tuple[SimSequence, ...]
    prefill_tokens: int


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, in tokens unless stated otherwise."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hits: int = 0
    preemptions: int = 0
    """Number of preempted sequences."""
    finished: Counter[str] = field(default_factory=Counter[str])
    """Samples per finish reason."""


class Scheduler:
    """First come, first served; the youngest sequence is preempted. Pure: no time, no I/O.

    `adapter_of` returns the current content of a sequence's LoRA.
    """

    def __init__(self, config: SimConfig, adapter_of: Callable[[SimSequence], str]) -> None:
        self.waiting: deque[SimSequence] = deque()
        self.running: list[SimSequence] = []
        self.held: dict[str, list[SimSequence]] = {}
        """Sequences of paused adapters, per adapter."""
        self.pool = BlockPool(config.kv_blocks, caching=config.enable_prefix_caching)
        self.stats = EngineStats()
        self.admitting = True
        """False while paused."""
        self.salt = 0
        """Version of the last update that kept KV in flight. Sequences find only blocks with this salt."""
        self._config = config
        self._adapter_of = adapter_of

    def __iter__(self) -> Iterator[SimSequence]:
        return chain(self.running, self.waiting, *self.held.values())

    def add(self, sequence: SimSequence) -> None:
        self.held.get(sequence.request.lora or "", self.waiting).append(sequence)

    def hold(self, adapter: str) -> None:
        """Make all present and new sequences of an adapter wait until `release`."""
        held = self.held.setdefault(adapter, [])
        for sequence in reversed([s for s in self.running if s.request.lora == adapter]):
            self.preempt(sequence)
        held.extend(s for s in self.waiting if s.request.lora == adapter)
        self.waiting = deque(s for s in self.waiting if s.request.lora != adapter)

    def release(self, adapter: str) -> None:
        self.waiting.extend(self.held.pop(adapter, ()))

    def remove(self, sequence: SimSequence) -> None:
        """Free the blocks of a sequence that has ended or was aborted."""
        if sequence.blocks:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.held.get(sequence.request.lora or "", self.waiting).remove(sequence)

    def plan(self, version: int) -> StepPlan | None:
        """Plan the next step under weights `version`; None if there is nothing to compute."""
        preempted = self.stats.preemptions
        for sequence in tuple(self.running):
            while sequence.blocks and not self._grow(sequence):
                self.preempt(self.running[-1])
        prefill = 0
        if preempted == self.stats.preemptions and self.admitting:
            prefill = self._admit_waiting(version)
        return StepPlan(tuple(self.running), prefill) if self.running else None

    def preempt(self, sequence: SimSequence) -> None:
        """Take a sequence's KV, and return it to the queue's head, to be recomputed."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def preempt_all(self) -> int:
        """Preempt every running sequence, and keep their order. Return how many."""
        count = len(self.running)
        while self.running:
            self.preempt(self.running[-1])
        return count

    def keep_in_flight(self, version: int) -> int:
        """Let only the running sequences use their KV from now on. Return how many. No step may be under way."""
        self.salt = version
        for sequence in self.running:
            sequence.kv_kept = True
        return len(self.running)

    def computed(self, sequence: SimSequence) -> None:
        """Note a finished step: all tokens but the newest have KV, and their full blocks can be shared."""
        full = (sequence.length - 1) // self._config.block_size
        if sequence.published < full:
            for i in range(sequence.published, full):
                self.pool.publish(sequence.blocks[i], (*sequence.salt, *sequence.block_ends[i]))
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
        """Give a sequence blocks. Return the tokens to compute; None without room."""
        salt = self.salt, self._adapter_of(sequence)
        # The last token is always computed, because its output is needed (vLLM: max_cache_hit_length).
        findable = sequence.block_ends[: (sequence.length - 1) // self._config.block_size]
        blocks = self.pool.take_cached([(*salt, *end) for end in findable])
        stale = next((block.version for block in blocks if block.version != version), version)
        fresh = self.pool.allocate(self._needed(sequence) - len(blocks), stale)
        if fresh is None:
            self.pool.release(blocks)
            return None
        hit = len(blocks) * self._config.block_size
        if self._config.enable_prefix_caching and not sequence.counted:
            sequence.counted = True
            self.stats.queries += sequence.length
            self.stats.hits += hit
        sequence.blocks = [*blocks, *fresh]
        sequence.published = len(blocks)
        sequence.kv_version, sequence.salt, sequence.kv_kept = stale, salt, False
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
