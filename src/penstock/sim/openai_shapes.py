"""The bodies of OpenAI's two APIs, as vLLM fills them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.sim import text
from penstock.sim.sequence import Delta, SimRequest, SimSequence

_UNUSED = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
"""Fields of vLLM's answer that the simulated engine has no use for."""


class Shape(ABC):
    """One API's answers to one HTTP request."""

    object_name = ""
    chunk_name = ""

    def __init__(self, request_id: str, model: str, eos_token_id: int, body: Mapping[str, Any]) -> None:
        self.body = body
        self._eos = eos_token_id
        self._head: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}
        self._return_ids = bool(body.get("return_token_ids"))
        self._told_prompt: set[int] = set()
        self._written: dict[int, int] = {}

    def answer(self, requests: Sequence[SimRequest], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        sequences = [s for request in requests for s in request.sequences]
        choices = [self.choice(i, sequence) for i, sequence in enumerate(sequences)]
        rest = dict.fromkeys(_UNUSED)
        return {**self._head, "object": self.object_name, "choices": choices, "usage": usage, **rest}

    def chunk_head(self) -> dict[str, Any]:
        """What every event holds."""
        return {**self._head, "object": self.chunk_name}

    def chunk(self, index: int, sequence: SimSequence, delta: Delta) -> dict[str, Any]:
        """The event for new tokens of choice `index`."""
        choice = {
            "index": index,
            **self._content(self._new_text(index, sequence, delta)),
            "logprobs": self._logprobs(sequence, delta.start, delta.end),
            "finish_reason": sequence.finish_reason if delta.finished else None,
            "stop_reason": sequence.stop_reason if delta.finished else None,
        }
        if self._return_ids:
            choice["token_ids"] = sequence.output[delta.start : delta.end]
        return {**self.chunk_head(), "choices": [choice]}

    def opening(self, requests: Sequence[SimRequest]) -> Iterator[dict[str, Any]]:
        """Events before the first token."""
        del requests
        return iter(())

    @abstractmethod
    def choice(self, index: int, sequence: SimSequence) -> dict[str, Any]:
        """Choice `index` of the whole answer."""

    @abstractmethod
    def _content(self, new_text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None: ...

    def _new_text(self, index: int, sequence: SimSequence, delta: Delta) -> str:
        stops = sequence.request.params.stop
        if not stops:
            stopped_by_token = delta.finished and isinstance(sequence.stop_reason, int)
            return text.decode(sequence.output[delta.start : delta.end - stopped_by_token], self._eos)
        start = self._written.get(index, 0)
        if delta.finished:
            whole = sequence.text
        else:
            # What might be the beginning of a stop string is held back, as vLLM does.
            whole = text.decode(sequence.output[: delta.end], self._eos)
            whole = whole[: max(start, len(whole) - max(map(len, stops)) + 1)]
        self._written[index] = len(whole)
        return whole[start:]


class CompletionShape(Shape):
    """`/v1/completions`."""

    object_name = chunk_name = "text_completion"

    def choice(self, index: int, sequence: SimSequence) -> dict[str, Any]:
        """A CompletionResponseChoice."""
        ids = self._return_ids
        return {
            "index": index,
            "text": sequence.text,
            "logprobs": self._logprobs(sequence, 0, len(sequence.output)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output if ids else None,
            "prompt_logprobs": None,
            "routed_experts": None,
            "prompt_token_ids": sequence.request.prompt_ids if ids else None,
        }

    def chunk(self, index: int, sequence: SimSequence, delta: Delta) -> dict[str, Any]:
        """The first event of a choice tells the prompt's ids."""
        chunk = super().chunk(index, sequence, delta)
        if self._return_ids and index not in self._told_prompt:
            self._told_prompt.add(index)
            chunk["choices"][0]["prompt_token_ids"] = sequence.request.prompt_ids
        return chunk

    def _content(self, new_text: str) -> dict[str, Any]:
        return {"text": new_text}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None:
        if not sequence.request.params.logprobs:
            return None
        as_ids = self.body.get("return_tokens_as_token_ids")
        ids, logprobs = sequence.output[start:end], sequence.logprobs[start:end]
        tokens = [f"token_id:{i}" if as_ids else text.character_of(i) for i in ids]
        return {
            "text_offset": list(range(start, end)),
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        }


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int, sequence: SimSequence) -> dict[str, Any]:
        """A ChatCompletionResponseChoice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None, "reasoning": None},
            "logprobs": self._logprobs(sequence, 0, len(sequence.output)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.output if self._return_ids else None,
            "routed_experts": None,
        }

    def answer(self, requests: Sequence[SimRequest], usage: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt's ids are told once, where completions tell them in each choice."""
        prompt_ids = requests[0].prompt_ids if self._return_ids else None
        return {**super().answer(requests, usage), "prompt_logprobs": None, "prompt_token_ids": prompt_ids}

    def opening(self, requests: Sequence[SimRequest]) -> Iterator[dict[str, Any]]:
        """Each choice's role comes first, the prompt's ids with it."""
        for sequence in requests[0].sequences:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": requests[0].prompt_ids} if self._return_ids else {}
            yield {**self.chunk_head(), "choices": [choice], **ids}

    def _content(self, new_text: str) -> dict[str, Any]:
        return {"delta": {"content": new_text}}

    def _logprobs(self, sequence: SimSequence, start: int, end: int) -> dict[str, Any] | None:
        if not sequence.request.params.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for token_id, logprob in zip(sequence.output[start:end], sequence.logprobs[start:end], strict=True):
            token = text.character_of(token_id)
            entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
            wanted = bool(self.body.get("top_logprobs"))
            content.append({**entry, "top_logprobs": [entry] if wanted else []})
        return {"content": content}
