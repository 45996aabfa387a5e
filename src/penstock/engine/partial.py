"""What a request's samples have so far, as the engine tells it while they are made, and how they are taken up again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.engine.wire import finish_of
from penstock.errors import EngineError
from penstock.types import Sample, SamplingParams, VersionSpan


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

    def add(self, news: Mapping[str, Any]) -> None:
        """What the engine tells of it since it told last."""
        self.ids += news["ids"]
        if news.get("logprobs") is not None:
            self.logprobs.append(news["logprobs"])
        for version, tokens in news["versions"]:
            if self.versions and self.versions[-1][0] == version:
                self.versions[-1][1] += tokens
            else:
                self.versions.append([version, tokens])
        self.finish, self.stop_reason = news.get("finish"), news.get("stop_reason")
        self.asked, self.whole_only = bool(news.get("asked")), bool(news.get("whole_only"))

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
        part: all that was told of it.
        params: of the request.
        spans: `[[version, start, end], ...]` of it, as the engine counts them at its end.

    Raises:
        EngineError: as `sample_of`; nobody has said how it ended; or not each of its tokens was told once.
    """
    if part.finish is None:
        raise EngineError(f"the answer has ended, and the engine has told {len(part.ids)} tokens of it and no end")
    made = spans[-1][2] if spans else 0
    if made != len(part.ids):
        raise EngineError(f"the engine has made {made} tokens of a sample and told {len(part.ids)}")
    return sample_of(part, params)


class Partials:
    """The samples of one request, by index."""

    def __init__(self) -> None:
        self._samples: dict[int, Partial] = {}

    def __iter__(self) -> Iterator[Partial]:
        return iter(self._samples.values())

    def get(self, index: int) -> Partial:
        """Sample `index`; one of which nothing was told has nothing."""
        return self._samples.setdefault(index, Partial())

    def add(self, news: Iterable[Mapping[str, Any]]) -> int:
        """What the engine tells of several; returns the number of new tokens."""
        tokens = 0
        for one in news:
            self.get(one["index"]).add(one)
            tokens += len(one["ids"])
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
