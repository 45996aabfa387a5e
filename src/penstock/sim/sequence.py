"""One request in the simulated engine and its `n` sequences."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from penstock.errors import EngineDeadError
from penstock.sim import text
from penstock.sim.blocks import Block
from penstock.sim.tokens import Model, Prefix, Weights, banned_before_min, expected_logprob, expected_token
from penstock.types import FinishReason, Sample, SamplingParams, VersionSpan

if TYPE_CHECKING:
    from penstock.sim.telling import Part


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens `[start, end)` of sequence `index` are new; `finished` where they are its last."""

    index: int
    start: int
    end: int
    finished: bool


class SimSequence:
    """One sample in the making. The scheduler moves it; `advance` makes its next token."""

    def __init__(self, request: SimRequest, index: int, model: Model, max_tokens: int) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.prefix = request.prefix
        self.block_ends = list(request.block_ends)
        """Length and CRC-32 at the end of each block that prompt and output fill."""
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.labels: list[str] = []
        """vLLM's label of each span's version."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.text_end: int | None = None
        """Where a stop string cut the text."""
        self.blocks: list[Block] = []
        self.published = 0
        """Blocks of it that others can find."""
        self.kv_version = 0
        self.taken_up = 0
        """Tokens of it that another engine has made."""
        self.taken_up_whole = False
        """They are all of it."""
        self.counted = False
        """Its prompt is already in the prefix cache's figures."""
        self._model = model
        self._max_tokens = max_tokens
        base = model.seed if params.seed is None else params.seed
        self._seed = None if params.temperature == 0 else base + index
        self._banned = banned_before_min(model, params)

    def take_up(self, part: Part) -> None:
        """Begin with what another engine has made of it."""
        self.taken_up, self.taken_up_whole = len(part.ids), part.finish is not None
        for token in part.ids:
            self._append(token)
        self.logprobs = list(part.logprobs) or [0.0] * len(part.ids)
        self.spans = list(part.spans)
        self.labels = ["default" if span.version == 0 else str(span.version) for span in part.spans]
        self.stop_reason = part.stop_reason
        if isinstance(part.stop_reason, str):
            self.text_end = len(self.text) - len(part.stop_reason)
        if part.finish is not None:
            self.finish(cast("FinishReason", part.finish))

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prefix.length

    @property
    def text(self) -> str:
        """Decoded output; EOS and a final stop token have no text, a stop string cuts it."""
        ids = self.output
        if self.finish_reason == "stop" and isinstance(self.stop_reason, int):
            ids = ids[:-1]
        return text.decode(ids, self._model.eos_token_id)[: self.text_end]

    def advance(self, weights: Weights, label: str) -> None:
        """Make the next token under `weights`, labelled `label`, and see whether it ends the sequence."""
        params = self.request.params
        position = len(self.output)
        banned = self._banned if position < params.min_tokens else ()
        token = expected_token(self._model, self.prefix, weights, seed=self._seed, banned=banned)
        self.logprobs.append(expected_logprob(self.prefix, token, weights, temperature=params.temperature))
        self._append(token)
        if self.labels and self.labels[-1] == label:
            last = self.spans[-1]
            self.spans[-1] = VersionSpan(last.version, last.start, position + 1)
        else:
            self.spans.append(VersionSpan(version_of(label), position, position + 1))
            self.labels.append(label)
        self._stop(token, params)

    def finish(self, reason: FinishReason) -> None:
        """End it for a reason from outside, with the tokens it has."""
        self.finish_reason = reason
        self.request.changed(self, len(self.output))

    def sample(self) -> Sample:
        """As the engine interface has it."""
        params = self.request.params
        return Sample(
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason or "abort",
            logprobs=tuple(self.logprobs) if params.logprobs else None,
            spans=tuple(self.spans),
            text=self.text if params.detokenize else "",
        )

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
        # A token adds at most one character, so a stop string that is there now ends here.
        tail = text.decode(self.output[-max(map(len, stops)) :], self._model.eos_token_id)
        for stop in stops:
            if tail.endswith(stop):
                self.text_end = len(self.text) - len(stop)
                self.finish_reason, self.stop_reason = "stop", stop
                return


class SimRequest:
    """One prompt and its `n` sequences; whoever sent it waits here."""

    def __init__(
        self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, *, lora: str | None, block_size: int
    ) -> None:
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.block_size = block_size
        self.prefix, self.block_ends = _fold(prompt_ids, block_size)
        self.params = params
        self.lora = lora
        """Name of the adapter it asked for."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache."""
        self.sequences: list[SimSequence] = []
        self.asked = False
        """Somebody asked for just its abort."""
        self.death: str | None = None
        """Why it will never finish."""
        self._unfinished = params.n
        self._listener: Callable[[Delta | None], None] | None = None
        self._done = asyncio.Event()

    @property
    def finished(self) -> bool:
        """All its sequences have ended."""
        return self._unfinished == 0

    def changed(self, sequence: SimSequence, start: int) -> None:
        """A sequence has new tokens from `start` on, or has ended."""
        ended = sequence.finish_reason is not None
        if self._listener is not None:
            self._listener(Delta(sequence.index, start, len(sequence.output), ended))
        if ended:
            self._unfinished -= 1
            if self.finished:
                self._end()

    def die(self, reason: str) -> None:
        """The engine is gone."""
        self.death = reason
        self._end()

    async def wait(self) -> None:
        """Return when all its sequences have ended. Raises EngineDeadError when the engine died first."""
        await self._done.wait()
        if self.death is not None:
            raise EngineDeadError(self.death)

    def listen(self, listener: Callable[[Delta | None], None]) -> None:
        """Have `listener` called with what was made so far, with all that follows, and with None at the end."""
        for sequence in self.sequences:
            if sequence.output or sequence.finish_reason is not None:
                listener(Delta(sequence.index, 0, len(sequence.output), sequence.finish_reason is not None))
        self._listener = listener
        if self._done.is_set():
            listener(None)

    def _end(self) -> None:
        self._done.set()
        if self._listener is not None:
            self._listener(None)


async def merged_deltas(requests: Sequence[SimRequest]) -> AsyncIterator[tuple[int, Delta]]:
    """New tokens of several requests as they are made, each with its request's index in `requests`.

    Raises:
        EngineDeadError: the engine died before all had ended.
    """
    queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
    for i, request in enumerate(requests):
        request.listen(lambda delta, i=i: queue.put_nowait((i, delta)))
    unfinished = len(requests)
    while unfinished:
        i, delta = await queue.get()
        if delta is not None:
            yield i, delta
        elif (death := requests[i].death) is not None:
            raise EngineDeadError(death)
        else:
            unfinished -= 1


def _fold(token_ids: tuple[int, ...], block_size: int) -> tuple[Prefix, list[tuple[int, int]]]:
    prefix, ends = Prefix(), list[tuple[int, int]]()
    for start in range(0, len(token_ids), block_size):
        prefix = prefix.extend(token_ids[start : start + block_size])
        if prefix.length % block_size == 0:
            ends.append((prefix.length, prefix.crc))
    return prefix, ends


def version_of(label: str) -> int:
    """A label as an integer: vLLM's `default` is 0; a label that is no number gets a stable one, far from any count."""
    if label == "default":
        return 0
    return int(label) if label.lstrip("-").isdigit() else (1 << 32) + zlib.crc32(label.encode())
