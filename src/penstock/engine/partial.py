"""The progress of a request's samples, as engines report it and as a resumed request returns it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.checks import reading
from penstock.errors import EngineError
from penstock.types import Sample, SamplingParams, VersionSpan
from penstock.wire import add_stretch, finish_of, spans_of


@dataclass(slots=True)
class Partial:
    """One sample so far, with the fields of `wire.SampleReport`.

    Attributes:
        logprobs: JSON text of each report. It goes back to an engine unchanged. As Python lists, it would take ten
            times the memory.
        versions: `[version, tokens]` for each stretch under one version, with `wire.Notes` if there are any. Together
            they cover `ids`.
        stop_reason: stop string or stop token id that ended the sample, as in vLLM.
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
        """Whether it was cut off, also by vLLM's `error`, which comes with a 500."""
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
        """Reset the sample to empty. Return the number of tokens thrown away."""
        wasted = len(self.ids)
        self.ids, self.logprobs, self.versions, self.finish, self.stop_reason = [], [], [], None, None
        return wasted

    def as_json(self) -> dict[str, Any]:
        """Return the data with which an engine can resume it (`plugin.resume.check_part`)."""
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
        """Return sample `index`, which is empty before its first report."""
        return self._samples.setdefault(index, Partial())

    def add(self, reports: Iterable[Mapping[str, Any]]) -> int:
        """Add the reports of several samples. Return the number of new tokens."""
        tokens = 0
        for report in reports:
            self.get(report["index"]).add(report)
            tokens += len(report["ids"])
        return tokens

    @property
    def cut(self) -> bool:
        return any(sample.cut for sample in self)

    def resume(self) -> str | None:
        """Return the value of `RESUME_ARG`; None if there is nothing to resume."""
        if not any(sample.ids for sample in self):
            return None
        size = 1 + max(self._samples)
        return orjson.dumps([self.get(i).as_json() for i in range(size)]).decode()


def whole_of(part: Partial, params: SamplingParams, spans: Sequence[Sequence[int]]) -> Sample:
    """Return a finished sample. `spans` is the engine's own count at the end.

    Raises:
        EngineError: no report has its end; a token was reported twice or never; or a token lacks logprob or version.
    """
    length = len(part.ids)
    if part.finish is None:
        raise EngineError(f"the answer has ended, but the engine reported {length} tokens of it and no end")
    if (made := spans[-1][2] if spans else 0) != length:
        raise EngineError(f"the engine made {made} tokens of a sample but reported {length}")
    logprobs = None
    if params.logprobs:
        with reading("logprobs of the engine", EngineError):
            logprobs = tuple(float(position[0][1]) for chunk in part.logprobs for position in orjson.loads(chunk))
        if len(logprobs) != length:
            raise EngineError(f"the engine reported {length} tokens but {len(logprobs)} logprobs")
    made_by = tuple(
        VersionSpan(version, start, end, **dict[str, Any](*notes))
        for version, start, end, *notes in spans_of(part.versions)
    )
    if (made_by[-1].end if made_by else 0) != length:
        raise EngineError(f"the weight versions {part.versions} do not cover the {length} reported tokens exactly")
    return Sample(tuple(part.ids), finish_of(part.finish), logprobs, made_by)
