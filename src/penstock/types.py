"""Frozen dataclasses of requests and answers: sampling parameters, samples, batches. No I/O."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

from penstock.checks import did_you_mean
from penstock.errors import RequestError

Message = Mapping[str, Any]
"""One chat message in OpenAI's form: `{"role": ..., "content": ...}`."""

SessionId = int | str
"""Id of a conversation; equal ids go to the same engine."""

FinishReason = Literal["stop", "length", "abort", "repetition"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `[start, end)` of one sample were made by weight version `version`."""

    version: int
    start: int
    end: int
    kv_kept: bool = False
    """Whether these tokens may attend to KV that older weights computed (`Fleet.update_weights`, `kv`)."""
    adapter: str | None = None
    """Name of the LoRA adapter that made them, on top of `version`."""
    adapter_version: int | None = None
    """The adapter's own version; None: no adapter, or one not loaded by the fleet."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Names and defaults are vLLM's, except the defaults of `max_tokens` and `logprobs`.

    `logprobs` asks for the logprob of each sampled token, as `GenerateOutput.response_logprobs` defines it. `seed` with
    `n > 1` gives sample `i` the seed `seed + i`. `skip_special_tokens` leaves the token that ends a text out of the
    text (vLLM's detokenizer shows any other).
    """

    max_tokens: int = 256
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = True
    logprobs: bool = True
    detokenize: bool = True
    """Whether the answer carries text; callers that need only tokens turn it off and save a call."""
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)
    """Grammar of the output, as in vLLM's parameter of that name; logprobs are then those under the grammar."""

    def __post_init__(self) -> None:
        # An engine's error for a wrong type names the engine's own fields; NaN would reach it as null.
        for names, what, convert in _SAMPLING_TYPES:
            for name in names.split():
                value = getattr(self, name)
                if value is None and name in {"seed", "structured_outputs"}:
                    continue
                try:
                    object.__setattr__(self, name, convert(value))  # frozen; numpy's numbers become Python's
                except (TypeError, ValueError, OverflowError):
                    raise RequestError(f"sampling parameter {name} must be {what}, got {value!r}") from None
        for name, what, fits in (
            ("n", "at least 1", self.n >= 1),
            ("max_tokens", "at least 1", self.max_tokens >= 1),
            ("temperature", "0 or more", self.temperature >= 0),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_tokens", "in [0, max_tokens]", 0 <= self.min_tokens <= self.max_tokens),
            ("seed", "a number of 64 bits", self.seed is None or -(2**63) <= self.seed < 2**63),
        ):
            if not fits:
                raise RequestError(f"sampling parameter {name} must be {what}, got {getattr(self, name)}")

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """Read an instance, a mapping of names to values, or None for the defaults.

        Raises:
            RequestError: for an unknown name (with the nearest known one) or a value out of range.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"sampling parameters must be SamplingParams or a mapping, got {type(value).__name__}")
        _refuse_unknown(value, cls, "sampling parameter")
        values = dict(value)
        for name in ("stop", "stop_token_ids"):
            given = values.pop(name, None)
            if given is not None:
                values[name] = (given,) if isinstance(given, (str, int)) else given
        return cls(**values)


def _refuse_unknown(given: Mapping[str, Any], cls: type[Any], what: str) -> None:
    known = sorted(f.name for f in dataclasses.fields(cls))
    for name in given:
        if name not in known:
            raise RequestError(f"unknown {what} {name!r}; {did_you_mean(str(name), known)}")


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return cast("Mapping[str, Any]", value)


def _finite(value: Any) -> float:
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise TypeError
    return value if isinstance(value, int) else float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _logprobs(value: Any) -> bool:
    """Read a flag, or vLLM's None, 0 or 1; an answer has no place for more logprobs."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if operator.index(value) not in {0, 1}:
        raise ValueError
    return True


def _strings(value: Any) -> tuple[str, ...]:
    strings = tuple(value)
    if isinstance(value, str) or not all(isinstance(s, str) and s for s in strings):
        raise TypeError
    return strings


_SAMPLING_TYPES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("max_tokens n top_k seed min_tokens", "a whole number", _whole),
    ("temperature top_p min_p presence_penalty frequency_penalty repetition_penalty", "a finite number", _finite),
    ("ignore_eos skip_special_tokens detokenize", "true or false", _flag),
    ("logprobs", "true or false, or vLLM's 0 or 1", _logprobs),
    ("stop", "a string or a list of them, none empty", _strings),
    ("stop_token_ids", "a list of token ids", lambda value: tuple(map(_whole, value))),
    ("structured_outputs", "an object of vLLM's structured outputs", _object),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion. `logprobs`: one float per token, or None if not asked for. Spans cover the tokens exactly."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None
    spans: tuple[VersionSpan, ...]
    text: str = ""
    routed_experts: Any = field(default=None, compare=False, repr=False)
    """Experts of each token that had a forward pass, an integer array `[prompt + tokens - 1, layers, experts a token]`,
    or None if the engine reports none (`engine.enable_return_routed_experts`)."""

    def versions(self) -> tuple[int, ...]:
        """Return each token's policy version, or its adapter's own, `[len(token_ids)]`."""
        made = [(s.version if s.adapter_version is None else s.adapter_version, s.end - s.start) for s in self.spans]
        return tuple(version for version, tokens in made for _ in range(tokens))

    def kv_kept(self) -> tuple[bool, ...]:
        """Return whether each token may attend to KV of older weights, `[len(token_ids)]`."""
        return tuple(span.kv_kept for span in self.spans for _ in range(span.start, span.end))


@dataclass(frozen=True, slots=True)
class GenerateBatch:
    """Input of `generate` (R2): exactly one of `prompts` (chats or plain strings) and `prompt_token_ids`."""

    prompts: Sequence[Sequence[Message] | str] | None = None
    prompt_token_ids: Sequence[Sequence[int]] | None = None
    sampling_params: SamplingParams | Mapping[str, Any] | None = None
    session_ids: Sequence[SessionId] | None = None
    adapter: str | None = None
    """Name of the LoRA adapter that answers; None: the base model."""

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.prompt_token_ids is None):
            has = "neither" if self.prompts is None else "both"
            raise RequestError(f"give exactly one of prompts and prompt_token_ids; this batch has {has}")
        for name in ("prompts", "prompt_token_ids", "session_ids"):
            given: object = getattr(self, name)
            # Text and mappings are also iterable, by character or key.
            if isinstance(given, (str, Mapping)) or not (given is None or hasattr(given, "__len__")):
                raise RequestError(
                    f"{name} is of type {type(cast('object', given)).__name__}; give a list with one entry a prompt"
                )
        if len(self) == 0:
            raise RequestError("empty batch: give at least one prompt")
        if self.session_ids is not None and len(self.session_ids) != len(self):
            raise RequestError(
                f"session_ids has {len(self.session_ids)} entries for {len(self)} prompts; give one for each"
            )
        for i, prompt in enumerate(() if self.prompts is None else self.prompts):
            _check_prompt(prompt, f"prompts[{i}]")
        for i, ids in enumerate(() if self.prompt_token_ids is None else self.prompt_token_ids):
            if not hasattr(ids, "__len__"):
                raise RequestError(f"prompt_token_ids[{i}] is {ids!r}; give a list of token ids for each prompt")
            if len(ids) == 0:
                raise RequestError(f"prompt_token_ids[{i}] is empty")

    @classmethod
    def of(cls, value: Self | Mapping[str, Any]) -> Self:
        """Read an instance, or a mapping of the fields.

        Raises:
            RequestError: for an unknown key (with the nearest known one), or an invalid value.
        """
        if isinstance(value, cls):
            return value
        given = cast("Mapping[str, Any]", value)
        _refuse_unknown(given, cls, "key of a batch")
        return cls(**given)

    def __len__(self) -> int:
        given = self.prompts if self.prompts is not None else self.prompt_token_ids
        return len(given) if given is not None else 0


def _check_prompt(prompt: object, where: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence):
        raise RequestError(f"{where} is of type {type(prompt).__name__}; a prompt is a string or a list of messages")
    messages = cast("Sequence[object]", prompt)
    if not messages:
        raise RequestError(f"{where} is a chat without a message")
    if wrongs := [message for message in messages if not isinstance(message, Mapping)]:
        hint = "; give token ids as prompt_token_ids" if isinstance(wrongs[0], int) else ""
        raise RequestError(f"{where} holds {wrongs[0]!r}, which is no message{hint}")


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """Output of `generate` (R2), all lists in input order, `n` samples of a prompt one after another.

    Attributes:
        responses: decoded text, `""` if `detokenize` is off.
        response_ids: token ids, ragged `[B * n][T_i]`.
        stop_reasons: `stop`, `length` or `abort`.
        response_logprobs: ragged as `response_ids`, or None if not asked for. Each is the logprob under the
            distribution from which its token was drawn. Engines apply penalties, temperature, `min_p`, `top_k` and
            `top_p` to the logits, in this order, and take the log-softmax over the tokens left. Without penalties and
            cuts it is log-softmax(logits / temperature) over the vocabulary. At temperature 0 it is the logprob at
            temperature 1, without cuts.
        response_spans: weight versions of the tokens (G1).
    """

    responses: list[str]
    response_ids: list[tuple[int, ...]]
    stop_reasons: list[FinishReason]
    response_logprobs: list[tuple[float, ...]] | None
    response_spans: list[tuple[VersionSpan, ...]]

    def __getitem__(self, name: str) -> Any:
        """Return a field by name: `output["responses"]`. KeyError names the fields."""
        if name not in (known := [field.name for field in dataclasses.fields(self)]):
            raise KeyError(f"generate gives no {name!r}; known: {', '.join(known)}")
        return getattr(self, name)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        """Make an output of samples, in order."""
        logprobs = [s.logprobs for s in samples if s.logprobs is not None]
        return cls(
            responses=[s.text for s in samples],
            response_ids=[s.token_ids for s in samples],
            stop_reasons=[s.finish_reason for s in samples],
            response_logprobs=logprobs if len(logprobs) == len(samples) else None,
            response_spans=[s.spans for s in samples],
        )
