"""What a request's samples have so far, as the engine reports it; and what is new of a stream that was resumed."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import orjson

from penstock.errors import EngineError, RequestError
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import RESUME_ARG, UNKNOWN_VERSION, finish_of


@dataclass(slots=True)
class Partial:
    """One sample so far.

    Attributes:
        ids: its tokens.
        logprobs: a JSON text for each chunk, of its tokens' `[[token id, logprob, rank, text], ...]`, the sampled token
            first; none where none were asked for. They are not read here and go back to an engine as they came: as
            Python's lists they would be ten times as large.
        versions: `[version, tokens]` of each stretch made under one version; together they cover `ids`.
        finish: why it ended; None while it has not.
        stop_reason: the stop string or stop token id that ended it, as vLLM has it.
        asked: it was aborted because somebody asked for just that, so it is not to go on.
        whole_only: it cannot be taken up in the middle (see `continuation.py`).
    """

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[str] = field(default_factory=list[str])
    versions: list[list[int]] = field(default_factory=list[list[int]])
    finish: str | None = None
    stop_reason: int | str | None = None
    asked: bool = False
    whole_only: bool = False

    @property
    def cut(self) -> bool:
        """It ended before its end and is to go on; vLLM's `error`, which comes with a 500, too."""
        return self.finish == "error" or (self.finish == "abort" and not self.asked)

    @property
    def ended(self) -> bool:
        """Nothing more is to come."""
        return self.finish is not None and not self.cut

    def add(self, report: Mapping[str, Any]) -> None:
        """Take in what the engine reports of it since its last report."""
        self.ids += report["ids"]
        if report.get("logprobs") is not None:
            self.logprobs.append(report["logprobs"])
        for version, tokens in report["versions"]:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1][1] += tokens
            else:
                self.versions.append([version, tokens])
        self.finish, self.stop_reason = report.get("finish"), report.get("stop_reason")
        self.asked, self.whole_only = bool(report.get("asked")), bool(report.get("whole_only"))

    def join(self, rest: Partial) -> None:
        """Append what another request has made of what was left of it."""
        end = {"finish": rest.finish, "stop_reason": rest.stop_reason, "asked": rest.asked}
        self.add({"ids": rest.ids, "versions": rest.versions, **end})
        self.logprobs += rest.logprobs

    def forget(self) -> int:
        """Begin anew; returns how many tokens are thrown away."""
        wasted = len(self.ids)
        self.ids, self.logprobs, self.versions, self.finish, self.stop_reason = [], [], [], None, None
        return wasted

    def as_json(self) -> dict[str, Any]:
        """As an engine takes it up."""
        return {
            "ids": self.ids,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "finish": self.finish if self.ended else None,
            "stop_reason": self.stop_reason if self.ended else None,
        }


PART_KEYS = frozenset(Partial().as_json())
ENDS = (None, "stop", "length", "abort", "repetition")
"""Finish reasons that `Partial.as_json` tells; behind vLLM's `error` a sample goes on."""


def parts_of(text: Any, samples: int) -> list[Any]:
    """Read the value of `RESUME_ARG`, which anyone can send; each part is yet to be checked (`check_part`).

    Args:
        text: JSON, if it is right.
        samples: how many the request asks for.

    Raises:
        RequestError: it is no list of at most so many parts.
    """
    parts = _list_in(text)
    _require(len(parts) <= samples, f"{len(parts)} samples where the request asks for {samples}")
    return parts


def check_part(part: Any, *, room: int, vocab_size: int, logprobs: bool) -> list[Any]:
    """Check one sample wholly, since vLLM's core checks nothing of it and would die.

    Args:
        part: as `Partial.as_json` makes it, if it is right.
        room: most tokens that the sample may have.
        vocab_size: all token ids are below.
        logprobs: the request asks for them, so each token needs one.

    Returns:
        Its logprobs, for each token `[[token id, logprob, rank, text], ...]`; none where it tells none.

    Raises:
        RequestError: it does not fit.
    """
    _require(_has_keys(part, PART_KEYS), f"{_short(part)} has not just {sorted(PART_KEYS)}")
    ids, versions, finish, reason = part["ids"], part["versions"], part["finish"], part["stop_reason"]
    _require(_is_list(ids), f"ids is no list but {_short(ids)}")
    wrong = [token for token in ids if not _is_token(token, vocab_size)]
    _require(not wrong, f"token {_short(wrong[:1])} lies outside the vocabulary [0, {vocab_size})")
    _require(finish in ENDS, f"the finish reason {_short(finish)} is none of {ENDS}")
    _require(not ids or len(ids) <= room - (finish is None), f"{len(ids)} tokens leave no room for another")
    _require(reason is None or type(reason) in (int, str), f"the stop reason {_short(reason)} is no text, id or null")
    covers = _is_list(versions) and all(map(_is_stretch, versions)) and sum(n for _, n in versions) == len(ids)
    _require(covers, f"the versions {_short(versions)} do not cover {len(ids)} tokens")
    chunks = part["logprobs"]
    _require(_is_list(chunks), f"logprobs is no list but {_short(chunks)}")
    positions = [position for chunk in chunks for position in _list_in(chunk)]
    _require(
        len(positions) == len(ids) or not (positions or logprobs), f"{len(ids)} tokens but {len(positions)} logprobs"
    )
    for token, position in zip(ids, positions, strict=False):
        fits = _is_list(position) and position and all(_is_entry(entry, vocab_size) for entry in position)
        _require(fits and position[0][0] == token, f"the logprobs {_short(position)} are not those of token {token}")
    return positions


def _list_in(text: Any) -> list[Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:  # too deep a nesting, and what is no text, too
        raise RequestError(f"{RESUME_ARG}: {_short(text)} is no JSON: {error}") from error
    _require(_is_list(found), f"{_short(text)} is no list")
    return found


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _has_keys(value: Any, keys: frozenset[str]) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).keys() == keys


def _is_token(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _is_stretch(value: Any) -> bool:
    return (
        _is_list(value)
        and [type(number) for number in value] == [int, int]
        and value[0] >= UNKNOWN_VERSION
        and value[1] > 0
    )


def _is_entry(value: Any, vocab_size: int) -> bool:
    return (
        _is_list(value)
        and len(value) == 4  # noqa: PLR2004 - token id, logprob, rank, text
        and _is_token(value[0], vocab_size)
        and type(value[1]) in (int, float)
        and math.isfinite(value[1])
        and type(value[2]) is int
        and (value[3] is None or isinstance(value[3], str))
    )


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _require(fits: Any, message: str) -> None:
    if not fits:
        raise RequestError(f"{RESUME_ARG}: {message}")


def sample_of(part: Partial, params: SamplingParams) -> Sample:
    """What a sample has, as an answer has it; `abort` where it is to go on.

    Raises:
        EngineError: its parts do not fit together (a logprob and a version for each token).
    """
    length = len(part.ids)
    logprobs = None
    if params.logprobs:
        logprobs = tuple(float(position[0][1]) for chunk in part.logprobs for position in orjson.loads(chunk))
        if len(logprobs) != length:
            raise EngineError(f"the engine has told {length} tokens but {len(logprobs)} logprobs")
    spans: list[VersionSpan] = []
    start = 0
    for version, tokens in part.versions:
        spans.append(VersionSpan(version, start, start + tokens))
        start += tokens
    if start != length:
        raise EngineError(f"the weight versions {part.versions} do not cover the {length} told tokens exactly")
    return Sample(tuple(part.ids), finish_of(part.finish or "abort"), logprobs, tuple(spans))


def whole_of(part: Partial, params: SamplingParams, spans: Sequence[Sequence[int]]) -> Sample:
    """A sample that has ended.

    Args:
        part: all that was reported of it.
        params: of the request.
        spans: `[[version, start, end], ...]` of it, as the engine counts them at its end.

    Raises:
        EngineError: its parts do not fit together (a logprob and a version for each token); no report says how it
            ended; or not each of its tokens was reported once.
    """
    length = len(part.ids)
    if part.finish is None:
        raise EngineError(f"the answer has ended, and the engine has told {length} tokens of it and no end")
    if (made := spans[-1][2] if spans else 0) != length:
        raise EngineError(f"the engine has made {made} tokens of a sample and told {length}")
    return sample_of(part, params)


class Partials:
    """The samples of one request, by index."""

    def __init__(self) -> None:
        self._samples: dict[int, Partial] = {}

    def __iter__(self) -> Iterator[Partial]:
        return iter(self._samples.values())

    def get(self, index: int) -> Partial:
        """Sample `index`, empty before the first report of it."""
        return self._samples.setdefault(index, Partial())

    def add(self, reports: Iterable[Mapping[str, Any]]) -> int:
        """Take in what the engine reports of several; returns the number of new tokens."""
        tokens = 0
        for report in reports:
            self.get(report["index"]).add(report)
            tokens += len(report["ids"])
        return tokens

    @property
    def cut(self) -> bool:
        """Some are to go on."""
        return any(sample.cut for sample in self._samples.values())

    def resume(self) -> str | None:
        """The value of `RESUME_ARG`; None where there is nothing to take up."""
        if not any(sample.ids for sample in self._samples.values()):
            return None
        size = 1 + max(self._samples)
        return orjson.dumps([self.get(i).as_json() for i in range(size)]).decode()


class StreamDeduplicator:
    """Passes on what is new of a stream that was resumed, and so tells everything from the start.

    It counts what of each part of each choice went on, in characters and list entries. The engine that goes on has the
    state of the one before it, so its text begins with the text that was passed on. Chunks are cut elsewhere, and
    random ids (the answer's, those of tool calls) differ: the first ones stay.
    """

    def __init__(self) -> None:
        self.passed_on = False
        """The caller has seen something."""
        self._over = False
        """The one event without choices, usage, went on: behind it nothing is new."""
        self._head: dict[str, Any] = {}
        self._passed: dict[tuple[Any, ...], int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    def begin_again(self) -> None:
        """The stream begins anew."""
        self._seen.clear()

    def of(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The part of an event that its reader has not seen; None where that is nothing."""
        if not self._head:
            self._head = {key: chunk[key] for key in ("id", "created", "model") if key in chunk}
        choices: list[dict[str, Any]] = chunk.get("choices") or []
        parts = [self._choice(choice) for choice in choices]
        new = [part for part in parts if part is not None]
        if not (new if choices else not self._over):
            return None
        self._over = not choices
        self.passed_on = True
        return {**chunk, **self._head, "choices": new}

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        before = sum(self._passed.values())
        first = not any(key[0] == choice["index"] for key in self._passed)
        index = choice["index"]
        part = {key: self._part((index, key), value) for key, value in choice.items() if key != "index"}
        return {"index": index, **part} if first or sum(self._passed.values()) > before else None

    def _part(self, key: tuple[Any, ...], value: Any) -> Any:
        """The part of `value` that lies beyond what was passed on under `key`."""
        name = key[-1]
        if name == "tool_calls" and isinstance(value, list):
            calls = cast("list[dict[str, Any]]", value)
            return [
                {"index": call.get("index", 0)}
                | {k: self._part((*key, call.get("index", 0), k), v) for k, v in call.items() if k != "index"}
                for call in calls
            ]
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, Any]", value)
            return {k: self._part((*key, k), v) for k, v in fields.items()}
        if name in _ONCE and value is not None:
            return value if self._advance(key, 1) == 0 else None
        if isinstance(value, (str, list)):
            whole = cast("str | list[Any]", value)
            return whole[self._advance(key, len(whole)) :]
        return value

    def _advance(self, key: tuple[Any, ...], length: int) -> int:
        """Count `length` more under `key`; returns how many of them were passed on before."""
        start = self._seen.get(key, 0)
        if key[-1] in _ONCE:
            start = 0
        passed = self._passed.get(key, 0)
        self._seen[key] = start + length
        self._passed[key] = max(passed, start + length)
        return min(max(0, passed - start), length)


_ONCE = frozenset({"role", "id", "type", "name", "finish_reason", "stop_reason"})
"""What comes once for a choice or a tool call, and is no text in parts."""
