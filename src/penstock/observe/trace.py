"""Spans of what engines and learner did, and a Chrome trace of them for Perfetto.

A span is one row of spans.jsonl: `step` (the step in which the span ended), `track` (`learner` or an engine's name),
`name`, `start` and `seconds` in the run's own time, and `args`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from penstock.control_types import UpdateReport
from penstock.errors import PenstockError

log = logging.getLogger(__name__)

LEARNER = "learner"
LOOK_S = 0.05
"""Seconds between two polls of the requests in flight. A shorter pause of an engine may be missed."""

Span = Mapping[str, Any]
Loads = Callable[[], Awaitable[Mapping[str, int]]]
"""Requests in flight on each engine."""


class Tracer:
    """Collects the spans of a run.

    `now` returns seconds since the run began, including those before a resume. Without `loads`, engines get no spans of
    generation.
    """

    def __init__(self, now: Callable[[], float], loads: Loads | None) -> None:
        self._now = now
        self._loads = loads
        self._spans: list[dict[str, Any]] = []
        self._doing: dict[str, tuple[str, float]] = {}
        """Current activity of each engine, and its start."""
        self._busy_s: dict[str, float] = {}
        """Seconds of this step in which each engine had requests in flight."""

    def add(self, track: str, name: str, start: float, seconds: float, **args: Any) -> None:
        """Record an activity of a track, from `start` for `seconds`."""
        self._spans.append({"track": track, "name": name, "start": start, "seconds": seconds, "args": args})

    def of_update(self, report: UpdateReport, start: float) -> None:
        """Record an update that began at `start`. Each engine gets its preparation and its bubble behind the gate."""
        published = start + report.seconds.get("publish", 0.0)
        gate = published + report.seconds.get("prepare", 0.0)
        for engine in report.engines:
            track = f"{engine.engine} weights"
            self.add(track, "prepare", published, engine.seconds.get("prepare", 0.0), version=report.version)
            self.add(track, "update", gate, engine.seconds["bubble"], version=report.version)

    async def watch(self) -> None:
        """Poll the requests in flight until cancelled."""
        while self._loads is not None:
            try:
                found = await self._loads()
            except PenstockError as error:  # the trace lacks this moment, without further harm
                log.debug("what is in flight is unknown: %s", error)
            else:
                self._note(found, self._now())
            await asyncio.sleep(LOOK_S)

    def cut(self, step: int, seconds: float) -> tuple[list[Span], float | None]:
        """End a step. Return its spans, and the share of its `seconds` in which engines were idle.

        The share is the mean over engines, or None without engines.
        """
        now = self._now()
        for engine, (doing, _) in self._doing.items():
            self._end(engine, now)
            self._doing[engine] = (doing, now)
        spans, self._spans = self._spans, []
        shares = [1 - min(self._busy_s[engine] / seconds, 1.0) for engine in self._doing] if seconds else []
        self._busy_s = dict.fromkeys(self._doing, 0.0)
        return [{"step": step, **span} for span in spans], sum(shares) / len(shares) if shares else None

    def _note(self, in_flight: Mapping[str, int], now: float) -> None:
        for engine in self._doing.keys() - in_flight.keys():  # the engine left the fleet
            self._end(engine, now)
            del self._doing[engine]
        for engine, requests in in_flight.items():
            doing = "generate" if requests else "wait"
            if engine not in self._doing:
                self._busy_s.setdefault(engine, 0.0)
            elif self._doing[engine][0] != doing:
                self._end(engine, now)
            else:
                continue
            self._doing[engine] = (doing, now)

    def _end(self, engine: str, now: float) -> None:
        doing, since = self._doing[engine]
        self.add(engine, doing, since, now - since)
        if doing == "generate":
            self._busy_s[engine] += now - since


def chrome_trace(spans: Sequence[Span], name: str) -> str:
    """Return spans as JSON in Chrome's trace format, with one row for each track."""
    named = {span["track"] for span in spans}
    tracks = sorted(named, key=lambda track: (track != LEARNER, [int(n) for n in re.findall(r"\d+", track)], track))
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}}]
    for row, track in enumerate(tracks, start=1):
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}})
        # If two spans begin together, the longer one comes first, because it contains the other.
        its = sorted((s for s in spans if s["track"] == track), key=lambda s: (s["start"], -s["seconds"]))
        events += [
            {
                "ph": "X", "pid": 1, "tid": row, "name": span["name"], "cat": "engine" if track != LEARNER else LEARNER,
                "ts": round(1e6 * span["start"], 1), "dur": round(1e6 * span["seconds"], 1),
                "args": {"step": span["step"], **span["args"]},
            }
            for span in its
        ]  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
