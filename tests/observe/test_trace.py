"""The trace of a run: who did what when, in Chrome's format, and how long engines had nothing in flight."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.config import RunConfig
from penstock.control_types import EngineUpdate, UpdateReport
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import idle_shares
from penstock.observe.trace import LEARNER, Tracer, chrome_trace
from penstock.settings import EngineConfig
from virtual_time import run_virtual


def test_spans_of_engines_follow_what_is_in_flight() -> None:
    async def main(_clock) -> None:
        loop = asyncio.get_running_loop()

        async def loads() -> dict[str, int]:
            return {"e0": 3 if 1 <= loop.time() - began < 3 else 0, "e1": 1}

        began = loop.time()
        tracer = Tracer(lambda: loop.time() - began, loads)
        watching = asyncio.create_task(tracer.watch())
        await asyncio.sleep(4.0)
        spans, idle = tracer.cut(1, 4.0)
        await asyncio.sleep(1.0)
        later, nothing = tracer.cut(2, 1.0)
        watching.cancel()
        e0 = [(s["name"], s["start"], s["start"] + s["seconds"]) for s in spans if s["track"] == "e0"]
        assert [name for name, *_ in e0] == ["wait", "generate", "wait"]
        assert [end for *_, end in e0] == pytest.approx([1.0, 3.0, 4.0], abs=0.15)
        assert idle == pytest.approx(0.25, abs=0.05), "e0 half of the time, e1 never"
        assert [(s["step"], s["track"], s["name"]) for s in later] == [(2, "e0", "wait"), (2, "e1", "generate")]
        assert nothing == pytest.approx(0.5)

    run_virtual(main)


def test_an_engine_that_left_the_fleet_does_nothing_more() -> None:
    now = [0.0]
    tracer = Tracer(lambda: now[0], None)
    tracer._note({"e0": 1, "e1": 1}, 0.0)
    tracer._note({"e0": 1}, 4.0)
    now[0] = 10.0
    spans, idle = tracer.cut(1, 10.0)
    assert [(s["track"], s["start"], s["seconds"]) for s in spans] == [("e1", 0.0, 4.0), ("e0", 0.0, 10.0)]
    assert idle == 0.0, "of the engines that are left"
    now[0] = 12.0
    spans, idle = tracer.cut(2, 2.0)
    assert [(s["track"], s["start"]) for s in spans] == [("e0", 10.0)]
    assert idle == 0.0
    tracer._note({"e0": 1, "e1": 1}, 12.0)
    now[0] = 13.0
    assert [s["track"] for s in tracer.cut(3, 1.0)[0]] == ["e0", "e1"], "a restarted one is back"


def test_tracks_stand_in_the_order_of_the_engines_numbers() -> None:
    spans = [
        {"track": f"e{n}", "name": "wait", "start": 0.0, "seconds": 1.0, "step": 1, "args": {}} for n in (10, 2, 1)
    ]
    events = json.loads(chrome_trace([*spans, {**spans[0], "track": "learner"}], "run"))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["learner", "e1", "e2", "e10"]


def test_an_update_stands_on_each_engine_where_it_was(tmp_path: Path) -> None:
    tracer = Tracer(lambda: 9.0, None)
    tracer.add(LEARNER, "training", 1.0, 2.0)
    engines = tuple(EngineUpdate(name, {"prepare": 0.5, "bubble": 0.25}, 0, "") for name in ("e0", "e1"))
    tracer.of_update(UpdateReport(7, 0, {"publish": 0.5, "prepare": 0.5, "gate": 0.3, "total": 1.3}, engines), 3.0)
    spans, idle = tracer.cut(4, 9.0)
    assert idle is None, "nothing is known of what was in flight"
    folder = RunFolder.create(tmp_path, RunConfig(engine=EngineConfig(model="m")))
    folder.append_spans(spans)
    trace = json.loads(folder.write_trace().read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == ["learner", "e0 weights", "e1 weights"]
    found = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert found[:3] == [
        ("learner", "training", 1e6, 2e6),
        ("e0 weights", "prepare", 3.5e6, 0.5e6),
        ("e0 weights", "update", 4e6, 0.25e6),
    ]
    assert folder.truncate(3) == []
    assert "training" not in folder.write_trace().read_text(), "a resumed run does the step again"


def test_idle_shares_weigh_steps_by_their_time() -> None:
    rows = [
        {"seconds/step": 1.0, "idle/learner": 1.0, "idle/engines": 0.5},
        {"seconds/step": 3.0, "idle/learner": 0.0},
    ]
    assert idle_shares(rows) == {"learner": 0.25, "engines": 0.5}
