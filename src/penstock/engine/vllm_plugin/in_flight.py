"""What every request in flight has made: tokens, logprobs, and exactly which weight version made which token."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import orjson


class Made:
    """One sample in flight; `state` is vLLM's RequestState."""

    def __init__(self, state: Any, place: int, *, whole_only: bool) -> None:
        self.state = state
        self.place = place
        self.versions: list[list[int]] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._whole_only = whole_only
        self._counted = 0
        self._told = 0
        self._told_finish = False
        self._untold: list[list[int]] = []

    @property
    def untold(self) -> int:
        """Tokens not told yet."""
        return self._counted - self._told

    @property
    def has_news(self) -> bool:
        """There is something to tell."""
        return self.untold > 0 or (self.finish is not None and not self._told_finish)

    def begin(self, versions: list[list[int]]) -> None:
        """It was taken up with these tokens of another engine, which its reader has."""
        self.versions = [list(part) for part in versions]
        self._counted = self._told = sum(tokens for _, tokens in versions)

    def count(self, version: int) -> None:
        """Its new tokens are of this version."""
        total = self.state.detokenizer.num_output_tokens()
        if total == self._counted:
            return
        for parts in (self.versions, self._untold):
            if not parts or parts[-1][0] != version:
                parts.append([version, 0])
            parts[-1][1] += total - self._counted
        self._counted = total

    def news(self, *, asked: bool) -> dict[str, Any]:
        """What `engine.partial.Partial.add` reads; told once."""
        start, self._told = self._told, self._counted
        versions, self._untold = self._untold, []
        self._told_finish = self.finish is not None
        return {
            "index": self.place,
            "ids": list(self.state.detokenizer.output_token_ids[start : self._counted]),
            "logprobs": _entries(self.state.logprobs_processor.logprobs, start, self._counted),
            "versions": versions,
            "finish": self.finish,
            "stop_reason": self.stop_reason,
            "asked": asked,
            "whole_only": self._whole_only,
        }

    def spans(self) -> list[list[int]]:
        """`[version, start, end]`, which cover its tokens exactly."""
        start, spans = 0, []
        for version, tokens in self.versions:
            spans.append([version, start, start + tokens])
            start += tokens
        return spans


class InFlight:
    """One HTTP request and its samples.

    Attributes:
        asked: somebody asked for just its abort.
        moved: set when a sample has a chunk to tell; cleared by whoever tells it.
        told_all: its reader gets every token by `news`, and needs none of them in the answer.
    """

    def __init__(self, chunk_tokens: int = 0, *, told_all: bool = False) -> None:
        self.asked = False
        self.moved = asyncio.Event()
        self.told_all = told_all
        self.samples: dict[str, Made] = {}
        """By vLLM's internal request id."""
        self.names: set[str] = set()
        """Of its prompts, by which others can abort them."""
        self.to_finish: dict[str, tuple[Made, dict[str, Any]]] = {}
        """Samples that had ended on another engine, and what they have."""
        self._chunk_tokens = chunk_tokens

    def add(self, request: Any, state: Any) -> Made:
        """Follow a sample from now on."""
        params = request.sampling_params
        samples = state.parent_req.n if state.parent_req is not None else 1
        external = state.parent_req.external_req_id if state.parent_req is not None else state.external_req_id
        # The engine's grammar, and the logprobs of prompt tokens, begin where the engine's own prompt ends or begins.
        whole_only = bool(
            getattr(params, "structured_outputs", None)
            or params.prompt_logprobs is not None
            or request.prompt_token_ids is None
        )
        made = Made(state, _prompt_number(external) * samples + state.request_index, whole_only=whole_only)
        self.samples[request.request_id] = made
        self.names.add(external)
        return made

    def note(self, made: Made, version: int, finish: Any, stop_reason: int | str | None) -> None:
        """A sample has new tokens, or has ended."""
        made.count(version)
        if finish is not None:
            made.finish, made.stop_reason = str(finish), stop_reason
        if self._chunk_tokens and made.untold >= self._chunk_tokens:
            self.moved.set()

    def lighten(self, output: Any) -> Any:
        """Leave the tokens out of vLLM's RequestOutput where their reader has them.

        VLLM makes several objects of each, and JSON of those, at once: 10 ms of its event loop for 512 tokens. 0.26 has
        None for samples that it is yet to add; an exception here would end its output handler, and so every request.
        """
        if self.told_all and output is not None:
            for completion in filter(None, output.outputs):
                completion.token_ids = []
                completion.logprobs = None if completion.logprobs is None else []
        return output

    def news(self) -> list[dict[str, Any]]:
        """What each sample has that was not told yet."""
        return [made.news(asked=self.asked) for made in self.samples.values() if made.has_news]

    def spans(self) -> list[list[list[int]]]:
        """For each sample, prompt by prompt; a sample without a token has no span."""
        by_place = {made.place: made.spans() for made in self.samples.values()}
        return [by_place.get(place, []) for place in range(1 + max(by_place, default=-1))]


FLOOR = -9999.0
"""Of logprobs, as vLLM's own answers have it."""
CURRENT: ContextVar[InFlight | None] = ContextVar("penstock_in_flight", default=None)
"""The HTTP request that this task serves."""


def _entries(logprobs: Any, start: int, end: int) -> str | None:
    """As JSON, `[[token id, logprob, rank, text], ...]` of each token; NaN and what is lower are `FLOOR`."""
    if logprobs is None or start == end:
        return None
    entries = [
        [[token, max(FLOOR, entry.logprob), entry.rank, entry.decoded_token] for token, entry in position.items()]
        for position in logprobs[start:end]
    ]
    return orjson.dumps(entries).decode()


def _prompt_number(external_request_id: str) -> int:
    """VLLM's ids of completions end in the number of the prompt: `cmpl-NAME-3`."""
    number = external_request_id.rpartition("-")[2]
    return int(number) if external_request_id.startswith("cmpl-") and number.isdecimal() else 0
