"""What the samples of a request have so far, as engines report it, and as a resumed request gives it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.errors import EngineError, reading
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import Notes, add_stretch, finish_of, spans_of


@dataclass(slots=True)
class Partial:
    """One sample so far; the fields are those of `wire.SampleReport`.

    Attributes:
        logprobs: the JSON text of each report. They go back to an engine as they came: as Python's lists they would
            take ten times the memory.
        versions: `[version, tokens]` of each stretch made under one version, with `wire.Notes` where there are any;
            together they cover `ids`.
        stop_reason: the stop string or stop token id that ended it, as vLLM has it.
    """

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[str] = field(default_factory=list[str])
    versions: list[list[Any]] = field(default_factory=list[list[Any]])
    finish: str | None = None
    stop_reason: int | str | None = None
    asked: bool = False
    whole_only: bool = False

    @property
    def cut(self) -> bool:
        """It was cut off and is to go on; vLLM's `error`, which comes with a 500, is a cut too."""
        return self.finish == "error" or (self.finish == "abort" and not self.asked)

    @property
    def ended(self) -> bool:
        return self.finish is not None and not self.cut

    def add(self, report: Mapping[str, Any]) -> None:
        """Add a `SampleReport`."""
        self.ids += report["ids"]
        if report.get("logprobs") is not None:
            self.logprobs.append(report["logprobs"])
        for stretch in report["versions"]:
            add_stretch(self.versions, *stretch)
        self.finish, self.stop_reason = report.get("finish"), report.get("stop_reason")
        self.asked, self.whole_only = bool(report.get("asked")), bool(report.get("whole_only"))

    def forget(self) -> int:
        """Begin again from nothing; return how many tokens are thrown away."""
        wasted = len(self.ids)
        self.ids, self.logprobs, self.versions, self.finish, self.stop_reason = [], [], [], None, None
        return wasted

    def as_json(self) -> dict[str, Any]:
        """Return what an engine needs to resume it (`wire.check_part`)."""
        end = (self.finish, self.stop_reason) if self.ended else (None, None)
        return {
            "ids": self.ids, "logprobs": self.logprobs, "versions": self.versions, "finish": end[0],
            "stop_reason": end[1],
        }  # fmt: skip


class Partials:
    """The samples of one request, by index."""

    def __init__(self) -> None:
        self._samples: dict[int, Partial] = {}

    def __iter__(self) -> Iterator[Partial]:
        return iter(self._samples.values())

    def get(self, index: int) -> Partial:
        """Return sample `index`, empty before the first report of it."""
        return self._samples.setdefault(index, Partial())

    def add(self, reports: Iterable[Mapping[str, Any]]) -> int:
        """Add the reports of several samples; return the number of new tokens."""
        tokens = 0
        for report in reports:
            self.get(report["index"]).add(report)
            tokens += len(report["ids"])
        return tokens

    @property
    def cut(self) -> bool:
        return any(sample.cut for sample in self)

    def resume(self) -> str | None:
        """Return the value of `RESUME_ARG`; None where there is nothing to resume."""
        if not any(sample.ids for sample in self):
            return None
        size = 1 + max(self._samples)
        return orjson.dumps([self.get(i).as_json() for i in range(size)]).decode()


def span_of(version: int, start: int, end: int, notes: Notes | None = None) -> VersionSpan:
    """Read a span of the wire, `[version, start, end]` or `[version, start, end, notes]`."""
    return VersionSpan(version, start, end, **(notes or {}))


def sample_of(part: Partial, params: SamplingParams) -> Sample:
    """Return what a sample has, as an answer has it; `abort` where it is to go on.

    Raises:
        EngineError: its parts do not fit together (a logprob and a version for each token).
    """
    length = len(part.ids)
    logprobs = None
    if params.logprobs:
        with reading("logprobs of the engine", EngineError):
            logprobs = tuple(float(position[0][1]) for chunk in part.logprobs for position in orjson.loads(chunk))
        if len(logprobs) != length:
            raise EngineError(f"the engine reported {length} tokens but {len(logprobs)} logprobs")
    spans = tuple(span_of(*span) for span in spans_of(part.versions))
    if (spans[-1].end if spans else 0) != length:
        raise EngineError(f"the weight versions {part.versions} do not cover the {length} reported tokens exactly")
    return Sample(tuple(part.ids), finish_of(part.finish or "abort"), logprobs, spans)


def whole_of(part: Partial, params: SamplingParams, spans: Sequence[Sequence[int]]) -> Sample:
    """Return a sample that has ended, with the `spans` of it that the engine counts at its end.

    Raises:
        EngineError: as of `sample_of`; or no report says how it ended; or a token was reported twice or never.
    """
    length = len(part.ids)
    if part.finish is None:
        raise EngineError(f"the answer has ended, but the engine reported {length} tokens of it and no end")
    if (made := spans[-1][2] if spans else 0) != length:
        raise EngineError(f"the engine made {made} tokens of a sample but reported {length}")
    return sample_of(part, params)
