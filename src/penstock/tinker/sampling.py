"""Samples for the Tinker SDK, from the engines of a fleet."""

from __future__ import annotations

import asyncio
import math
import secrets
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock import wire
from penstock.aio import all_or_first_error, cancelled
from penstock.checks import reading
from penstock.engine.client import ResumableRequest
from penstock.engine.partial import Partial, whole_of
from penstock.errors import DeadlineError, EngineDeadError, EngineError, EngineHTTPError, StateError, UserError
from penstock.fleet.fleet import Fleet
from penstock.fleet.lifecycle import State
from penstock.tinker.futures import Operation, Outcome
from penstock.tinker.requests import SampleBody
from penstock.tinker.schema import PROTO_TYPE, pb
from penstock.types import SamplingParams

MOST_SAMPLES = 1024
"""Maximum number of samples in one request."""
MOST_TOP = 20
"""vLLM's limit of logprobs per position."""
LOADS = 8
"""Loads of an adapter for one sample, if others keep evicting it."""
RECONNECTS = 2
"""Reconnects for one sample, if the fleet's owner did not answer in time or has been replaced."""
CONNECT_S, AGAIN_S = 60.0, 1.0
"""Seconds to wait for an owner, which allow for a restart of the service, and seconds between two attempts.

The main process ends with its owner long before. Its samples stay pending, and run at the next start.
"""
LOAD_S = 120.0
REQUEST_S = 6 * 3600.0
NO_TOKEN, NO_LOGPROB = 0, -99999.0
"""Empty cells of the SDK's matrices."""
_MISSING, _BAD, _UNPROCESSABLE = 404, 400, 422


@dataclass(frozen=True, slots=True)
class Source:
    """The weights that a sampler samples from.

    Attributes:
        adapter: name of the adapter on the fleet; None: the base model.
        folder: folder of the saved adapter, for loading it after an eviction or a restart of the fleet.
    """

    adapter: str | None = None
    folder: str | None = None


class Sampling:
    """Runs `asample` operations on a fleet, which it reaches through its owner.

    Each sample is its own request, so that a router spreads them.

    Args:
        url: returns the router's URL, or None while it is unknown.
        data: the data folder, in which adapters lie.
    """

    def __init__(self, url: Callable[[], Awaitable[str | None]], data: Path) -> None:
        self._url = url
        self._data = data
        self._fleet: Fleet | None = None
        self._left: list[Fleet] = []
        self._opening: asyncio.Task[Fleet] | None = None
        self._loading: dict[str, asyncio.Task[Any]] = {}

    async def fleet(self) -> Fleet:
        """Return a client of the fleet, opened at the first call. Wait for an owner that is gone.

        Raises:
            EngineError: the fleet's URL is unknown, or its owner cannot be reached.
            StateError: the owner cannot be reached.
        """
        if self._fleet is not None:
            return self._fleet
        if self._opening is None:  # shared by all waiting samples
            self._opening = asyncio.create_task(self._connect(), name="tinker-connect")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _connect(self) -> Fleet:
        end = asyncio.get_running_loop().time() + CONNECT_S
        while True:
            url = await self._url()  # a new owner has another URL
            if url is None:
                raise EngineError("this service knows no engines: no process on its database has named a fleet")
            try:
                self._fleet = await Fleet.connect(url, request_timeout_s=REQUEST_S)
            except (EngineDeadError, DeadlineError, StateError):
                if asyncio.get_running_loop().time() >= end:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                return self._fleet

    def _opened(self, done: asyncio.Task[Fleet]) -> None:
        self._opening = None
        if not done.cancelled():
            done.exception()  # read here; each waiting caller gets it too

    async def _load(self, source: Source) -> None:
        """Load a saved adapter onto the fleet, once for all requests that wait for it."""
        name = source.adapter
        if name is None or source.folder is None:
            raise UserError(f"sampler {name!r} was not used for hours and is not kept any more; save the weights again")
        task = self._loading.get(name)
        if task is None:
            fleet = await self.fleet()
            task = asyncio.ensure_future(fleet.load_adapter(name, str(self._data / source.folder), timeout_s=LOAD_S))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name, None))
        await asyncio.shield(task)

    async def lost(self, fleet: Fleet) -> bool:
        """Return whether `fleet` is unusable because its owner is gone or hangs. The next call then reconnects."""
        if self._fleet is not fleet:
            return True
        with suppress(EngineDeadError, DeadlineError, StateError):  # the owner is gone, hangs, or ends
            engines = await fleet.engines(stats=False)
            if any(engine.state not in {State.DEAD, State.STOPPED} for engine in engines):
                return False
        if self._fleet is fleet:
            self._fleet = None
            self._left.append(fleet)  # other callers may still wait for its answers
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._opening is not None:
            await cancelled(self._opening)
        for fleet in [*self._left, *([] if self._fleet is None else [self._fleet])]:
            await fleet.teardown()

    async def run(self, operation: Operation, source: Source, context: int | None = None) -> Outcome:
        """Return the SDK's `SampleResponse`.

        Raises:
            UserError: the request asks for something that the engines cannot do. PenstockError: they failed.
        """
        body = SampleBody.of(operation.body)
        left = RECONNECTS
        while True:
            fleet = await self.fleet()
            request = _Request.of(body, fleet.data.vocab_size, context)
            try:
                answers = await self._answers(fleet, request, source)
                return Outcome(request.response(answers).SerializeToString(), PROTO_TYPE)
            except (EngineError, StateError) as error:
                if isinstance(error, EngineHTTPError) and error.status in {_BAD, _UNPROCESSABLE}:
                    raise UserError(str(error)) from error
                if not left or not await self.lost(fleet):
                    raise
                left -= 1

    async def _answers(self, fleet: Fleet, request: _Request, source: Source) -> list[_Answer]:
        group = secrets.token_hex(8) if request.samples > 1 else None

        async def one(index: int) -> _Answer:
            for _ in range(LOADS):
                try:
                    return await _ask(fleet, request, source.adapter, index, group)
                except EngineHTTPError as error:
                    if error.status != _MISSING or source.adapter is None:
                        raise
                    await self._load(source)
            return await _ask(fleet, request, source.adapter, index, group)

        return await all_or_first_error(one(index) for index in range(request.samples))


async def _ask(fleet: Fleet, request: _Request, adapter: str | None, index: int, group: str | None) -> _Answer:
    body = request.body(index, adapter)
    headers = fleet.data.headers_of(request.prompt, request.params, group_id=group)
    sent = ResumableRequest(fleet.data, wire.GENERATE, body, headers=headers, timeout_s=REQUEST_S)
    answer = await fleet.while_serving(sent.answer())
    return _Answer(sent.partials.get(0), wire.padded(answer.spans or (), 1)[0], answer.body)


@dataclass(frozen=True, slots=True)
class _Answer:
    part: Partial
    spans: Sequence[Sequence[int]]
    body: Any


@dataclass(frozen=True, slots=True)
class _Request:
    """An `asample` request in the engines' form."""

    prompt: list[int]
    params: SamplingParams
    samples: int
    top: int
    """Number of top logprobs for each sampled token."""
    prompt_top: int | None
    """Number of top logprobs for each prompt token; None: no logprobs of the prompt."""
    prompt_from: int
    """First position of the prompt that is scored."""

    @classmethod
    def of(cls, given: SampleBody, vocab_size: int | None, context: int | None) -> _Request:
        """Read a request. UserError: it asks for something that no engine supports; the message names it."""
        _refuse_unsupported(given)
        prompt = [token for chunk in given.prompt.chunks for token in chunk.tokens]
        if not prompt:
            raise UserError("the prompt has no token; give at least one")
        top = vocab_size if vocab_size is not None else 2**31
        if min(prompt) < 0 or max(prompt) >= top:
            wrong = next(token for token in prompt if not 0 <= token < top)
            raise UserError(f"token {wrong} of the prompt lies outside the vocabulary [0, {top})")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(given, name) > MOST_TOP:
                raise UserError(f"{name} is {getattr(given, name)}; the engines give at most {MOST_TOP}")
        last = given.prompt_logprobs_last_n
        if last is not None and not (given.prompt_logprobs and 1 <= last < len(prompt)):
            raise UserError(f"prompt_logprobs_last_n is {last}; it needs prompt_logprobs, and 1 to {len(prompt) - 1}")
        params = _params(given)
        if context is not None and len(prompt) + params.max_tokens > context:  # an engine would silently cut it
            raise UserError(
                f"prompt and max_tokens are {len(prompt)} + {params.max_tokens} tokens, and the model's context has "
                f"{context}; ask for at most {max(context - len(prompt), 0)}"
            )
        scored = given.prompt_logprobs or given.topk_prompt_logprobs
        return cls(
            prompt,
            params,
            given.num_samples,
            given.topk_sample_logprobs,
            given.topk_prompt_logprobs if scored else None,
            1 if last is None else len(prompt) - last,
        )

    def body(self, index: int, adapter: str | None) -> dict[str, Any]:
        """Return the request body of sample `index`. The first sample scores the prompt."""
        body = wire.generate_body(self.prompt, self.params, adapter=adapter)
        sampling: dict[str, Any] = body["sampling_params"]
        sampling["logprobs"] = self.top
        if self.params.seed is not None:
            sampling["seed"] = (self.params.seed + index) % 2**63
        if self.prompt_top is not None and index == 0:
            sampling["prompt_logprobs"] = self.prompt_top
        return body

    def response(self, answers: Sequence[_Answer]) -> Any:
        """Build the SDK's response message."""
        response = pb.SampleResponse()
        for answer in answers:
            self._add_sequence(response.sequences.add(), answer)
        if self.prompt_top is not None:
            with reading("prompt logprobs of an engine", EngineError):
                self._add_prompt(response, answers[0].body["prompt_logprobs"])
        return response

    def _add_sequence(self, sequence: Any, answer: _Answer) -> None:
        sample = whole_of(answer.part, self.params, answer.spans)
        if sample.finish_reason == "abort":
            raise EngineError("the engines were told to abort this request")
        sequence.stop_reason = pb.STOP_REASON_STOP if sample.finish_reason == "stop" else pb.STOP_REASON_LENGTH
        sequence.tokens = array("i", sample.token_ids).tobytes()
        sequence.logprobs = array("f", sample.logprobs or ()).tobytes()
        if self.top:
            rows: list[list[tuple[int, float]]] = []
            for chunk in answer.part.logprobs:
                rows += [_best([(e[0], e[1], e[2]) for e in entries], self.top) for entries in orjson.loads(chunk)]
            _fill(sequence.topk_sampled_logprobs, rows, self.top)

    def _add_prompt(self, response: Any, positions: Sequence[Mapping[str, Any] | None]) -> None:
        logprobs, rows = array("f"), list[list[tuple[int, float]]]()
        for place, (token, entries) in enumerate(zip(self.prompt, positions, strict=True)):
            known: Mapping[str, Any] = entries if entries is not None and place >= self.prompt_from else {}
            logprobs.append(float(known[str(token)]["logprob"]) if known else math.nan)
            rows.append(_best([(int(t), e["logprob"], e["rank"]) for t, e in known.items()], self.prompt_top or 0))
        response.prompt_logprobs = logprobs.tobytes()
        if self.prompt_top:
            _fill(response.topk_prompt_logprobs, rows, self.prompt_top)


def _params(given: SampleBody) -> SamplingParams:
    """Return the sampling parameters under the engines' names. UserError: one is missing or out of range."""
    params = given.sampling_params
    if params.max_tokens is None:
        raise UserError("sampling_params.max_tokens is missing; say how many tokens a sample may have at most")
    if not 1 <= given.num_samples <= MOST_SAMPLES:
        raise UserError(f"num_samples is {given.num_samples}; it is from 1 to {MOST_SAMPLES}")
    values: dict[str, Any] = {"detokenize": False}
    match params.stop:
        case None:
            pass
        case []:
            values["ignore_eos"] = True
        case str(text):
            values["stop"] = (text,)
        case [str(), *_] as texts:
            values["stop"] = tuple(texts)
        case tokens:
            values["stop_token_ids"] = tuple(tokens)
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=None if params.seed is None else params.seed % 2**63,
        **values,
    )


def _refuse_unsupported(given: SampleBody) -> None:
    for chunk in given.prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"the prompt has a chunk of type {chunk.type!r}; this service takes encoded_text alone")
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(given, name):
            raise UserError(f"{name} is not supported by this service; leave it out")


def _best(entries: Sequence[tuple[int, float, int]], top: int) -> list[tuple[int, float]]:
    """Return the `top` likeliest tokens. The sampled token counts only if it is among them."""
    ranked = sorted({entry[0]: entry for entry in entries}.values(), key=lambda entry: entry[2])
    return [(token, logprob) for token, logprob, rank in ranked if rank <= top][:top]


def _fill(matrix: Any, rows: Sequence[Sequence[tuple[int, float]]], top: int) -> None:
    tokens, logprobs = array("i"), array("f")
    for row in rows:
        padded = [*row, *[(NO_TOKEN, NO_LOGPROB)] * (top - len(row))]
        tokens.extend(token for token, _ in padded)
        logprobs.extend(logprob for _, logprob in padded)
    matrix.token_ids, matrix.logprobs = tokens.tobytes(), logprobs.tobytes()
    matrix.k, matrix.length = top, len(rows)
