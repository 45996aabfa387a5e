"""The session table and the load board of several processes, used by processes."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from penstock.errors import UserError
from penstock.router.doorbell import Doorbell, make_bells
from penstock.router.engine_slots import EngineSlots
from penstock.router.hints import Hints
from penstock.router.loads import Load
from penstock.router.membership import EngineEntry
from penstock.router.placement import Placement, PlacementOptions
from penstock.router.shared_loads import LOOK_S, SharedLoads
from penstock.router.shared_sessions import SharedSessions
from penstock.router.shared_state import WAYS, Layout, SharedState

ENGINES = ("a", "b", "c")
SLOTS = 4


def entries(*names: str) -> list[EngineEntry]:
    """`a` and `a@2` are engines of one name at two URLs."""
    ports = [name.partition("@")[2] or str(1 + ord(name[0])) for name in names]
    return [EngineEntry(name[0], f"http://h:{port}") for name, port in zip(names, ports, strict=True)]


class Tables:
    """The shared tables as the process of one row sees them; by default the last, the hub's."""

    def __init__(self, workers: int = 0, *, sessions: int = 1024) -> None:
        self.layout = Layout(workers, SLOTS, sessions)
        self.state = SharedState.create(self.layout)
        self.bells = make_bells(self.layout.rows)
        self.slots = EngineSlots(SLOTS)
        self.loads, self.sessions = self.of(workers)
        self.engines(*ENGINES)

    def of(self, process: int) -> tuple[SharedLoads, SharedSessions]:
        loads = SharedLoads(self.state, process, Doorbell(self.state, self.bells, process))
        sessions = SharedSessions(self.state, loads)
        loads.set_engines(self.slots.slots, ())
        sessions.set_engines(self.slots.homes)
        return loads, sessions

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.state.close()
        for bell in self.bells:
            os.close(bell)

    def engines(self, *names: str) -> None:
        """As the hub does it."""
        self.loads.clear(self.slots.assign(entries(*names), self.loads.busy))
        self.loads.set_engines(self.slots.slots, self.slots.lost)
        self.sessions.set_engines(self.slots.homes)

    def announcement(self) -> tuple[Any, ...]:
        return ("engines", self.slots.homes, self.slots.slots, self.slots.lost)


class Process:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def start(self, *call: Any) -> None:
        assert self.child.stdin
        self.child.stdin.write(json.dumps(call) + "\n")
        self.child.stdin.flush()

    def finish(self) -> Any:
        assert self.child.stdout
        return json.loads(self.child.stdout.readline())

    def __call__(self, *call: Any) -> Any:
        self.start(*call)
        return self.finish()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(10)


@contextmanager
def processes(count: int, **options: Any) -> Iterator[tuple[Tables, list[Process]]]:
    with ExitStack() as stack:
        tables = stack.enter_context(Tables(count, **options))
        started: list[Process] = []
        layout, files = tables.layout, (tables.state.fd, *tables.bells)
        for i in range(count):
            arguments = (files[0], i, count, layout.engines, layout.sessions, *files[1:])
            script = str(Path(__file__).with_name("shared_table_process.py"))
            child = subprocess.Popen(
                [sys.executable, script, *map(str, arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=files,
            )  # fmt: skip
            started.append(Process(child))
            stack.callback(started[-1].kill)
            stack.enter_context(child.stdin)  # type: ignore[arg-type]
            stack.enter_context(child.stdout)  # type: ignore[arg-type]
        for process in started:
            process(*tables.announcement())
        yield tables, started


def test_random_calls_of_three_processes_are_those_of_a_dict() -> None:
    dice = random.Random(7)
    ids = [f"s{i}" for i in range(60)]
    model: dict[str, tuple[str, int, float, bool]] = {}
    """Engine, tokens, last use, whether it counts."""
    now = 1000.0
    with processes(3) as (tables, workers):
        for _ in range(2000):
            now += dice.randrange(100) / 64
            worker, session = dice.choice(workers), dice.choice(ids)
            home, tokens, used, counts = model.get(session, (None, 0, 0.0, False))
            match dice.randrange(7):
                case 0 | 1:
                    assert worker("get", session) == (None if home is None else [home, tokens, used])
                case 2 | 3:
                    seen, engine, tokens = dice.choice([home, None, "b"]), dice.choice(ENGINES), dice.randrange(1000)
                    wins = home is None or home in {seen, engine}
                    assert worker("settle", session, engine, tokens, now, seen) == (engine if wins else home)
                    if wins:
                        model[session] = (engine, tokens, now, True)
                case 4:
                    worker("touch", session, now)
                    if home is not None:
                        model[session] = (home, tokens, now, counts)
                case 5:
                    assert worker("drop", session) is (home is not None)
                    model.pop(session, None)
                case _:
                    idle, gone = now - 30, now - 60
                    ceased = [s for s, (_, _, used, counts) in model.items() if used < idle and counts]
                    assert worker("expire", idle, gone) == len(ceased)
                    model = {s: (h, t, u, c and u >= idle) for s, (h, t, u, c) in model.items() if u >= gone}
        assert len(model) > 10  # or nothing was tried
        for engine in ENGINES:
            living = [(tokens, counts) for home, tokens, _, counts in model.values() if home == engine]
            expected = (len(living), sum(tokens for tokens, counts in living if counts))
            assert tables.sessions.counts(engine) == expected
            assert [tuple(worker("counts", engine)) for worker in workers] == [expected] * 3
        assert len(tables.sessions) == len(model)


def test_processes_that_settle_the_same_sessions_at_once_agree() -> None:
    decided: list[str] = []
    with processes(3, sessions=1 << 18) as (tables, workers):
        for attempt in range(20):  # on a busy machine one of them may begin when the others are through
            ids = [f"{attempt}-{i}" for i in range(3000)]
            for i, (worker, engine) in enumerate(zip(workers, ENGINES, strict=True)):
                worker.start("settle_all", ids[i * 1000 :] + ids[: i * 1000], engine, 1.0)
            each = [worker.finish() for worker in workers]
            each = [d[3000 - i * 1000 :] + d[: 3000 - i * 1000] for i, d in enumerate(each)]
            assert each[0] == each[1] == each[2]
            decided += each[0]
            if len(set(each[0])) == 3:  # each of them was the first somewhere
                break
        else:
            pytest.fail("they never ran at once, so nothing was tried")
        for engine in ENGINES:
            count = decided.count(engine)
            assert tables.sessions.counts(engine) == (count, count)


def test_a_process_that_dies_in_a_change_does_not_block_the_others() -> None:
    with processes(2) as (tables, (one, two)):
        tables.sessions.settle("s", "a", 1, 1.0, seen=None)
        one("lock")  # it is changing every bucket
        two.start("settle", "s", "b", 2, 2.0, "a")
        assert not readable(two.child.stdout, 0.1)
        record = tables.sessions.get("s")  # who only reads is not held up
        assert record is not None
        assert record.engine == "a"
        one.kill()
        assert two.finish() == "b"
        tables.loads.bury(0)
        assert tables.sessions.counts("a") == (0, 0)
        assert tables.sessions.counts("b") == (1, 2)


def test_the_least_recently_used_session_of_a_full_bucket_goes() -> None:
    with Tables(sessions=WAYS) as tables:  # one bucket
        for i in range(WAYS):
            tables.sessions.settle(f"s{i}", "a", 10, float(1 + i), seen=None)
        tables.sessions.touch("s0", 100.0)
        assert set(tables.loads.changed()) == {"a"}
        tables.sessions.settle("new", "b", 5, 101.0, seen=None)
        assert set(tables.loads.changed()) == {"a", "b"}  # one of a's has gone
        assert tables.sessions.get("s1") is None
        for session, engine in (("s0", "a"), ("new", "b")):
            record = tables.sessions.get(session)
            assert record is not None
            assert record.engine == engine
        assert tables.sessions.counts("a") == (WAYS - 1, 10 * (WAYS - 1))


def test_sessions_of_an_engine_that_left_do_not_pass_to_another_not_even_of_its_name() -> None:
    with Tables() as tables:
        tables.sessions.settle("s", "a", 10, 1.0, seen=None)
        for engines in (("b", "c"), ("b", "c", "d"), ("b", "c", "d", "a"), ("b", "c", "a@9")):
            tables.engines(*engines)
            record = tables.sessions.get("s")
            assert record is not None  # known, so that its next turn does not wait as a new session would
            assert (record.engine, record.tokens) == (None, 0)
            assert [tables.sessions.counts(name[0]) for name in engines] == [(0, 0)] * len(engines)
        assert tables.sessions.settle("s", "a", 3, 1.0, seen=None) == "a"
        tables.engines("a@10", "b")
        assert tables.sessions.counts("a") == (0, 0)
        assert tables.sessions.settle("s", "b", 3, 1.0, seen=None) == "b"
        assert tables.sessions.counts("b") == (1, 3)
        assert tables.sessions.counts("a") == (0, 0)


def test_an_engine_keeps_its_slot_until_its_last_request_has_ended() -> None:
    with processes(1) as (tables, (worker,)):
        worker("add", "a", 1, 100, 100)
        for engines in (("b", "c", "d"), ("b", "c")):
            tables.engines(*engines)
            worker(*tables.announcement())
        with pytest.raises(UserError, match="at most 4 engines"):
            tables.engines("b", "c", "d", "e")
        tables.engines("b", "c", "a@7")  # back while a request that it got before is in flight
        worker(*tables.announcement())
        assert tables.loads.totals("a") == Load(1, 100, 100)
        worker("add", "a", -1, -100, -100)
        assert tables.loads.totals("a") == Load(0, 0, 0)
        tables.engines("b", "c")
        tables.engines("b", "c", "d", "e")
        assert tables.loads.totals("a") == Load()


def test_what_a_dead_process_had_in_flight_is_gone_and_its_sessions_stay() -> None:
    with processes(2) as (tables, (one, two)):
        assert two("changed") == ["a", "b", "c"]  # a new set
        one("settle", "s", "a", 10, 1.0, None)
        two("settle", "t", "b", 7, 1.0, None)
        assert two("changed") == ["a", "b"]
        one("add", "a", 3, 300, 30)
        two("add", "a", 1, 100, 0)
        assert tables.loads.totals("a") == Load(4, 400, 30)
        assert two("changed") == ["a"]  # what it added itself it knows
        assert two("changed") == []
        one.kill()
        tables.loads.bury(0)
        assert two("changed") == ["a"]
        assert Load(*two("totals", "a")) == Load(1, 100, 0)
        assert two("counts", "a") == [1, 10]
        assert two("drop", "s") is True
        assert two("counts", "a") == [0, 0]


def test_changes_are_seen_over_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    monkeypatch.setattr("penstock.router.shared_loads.time", SimpleNamespace(monotonic=lambda: now))
    with ExitStack() as stack:
        state = SharedState.create(Layout(1, 256, WAYS))
        stack.callback(state.close)
        bells = make_bells(2)
        slots = {f"e{i}": i for i in range(200)}
        one, two = (SharedLoads(state, i, Doorbell(state, bells, i)) for i in (0, 1))
        for loads in (one, two):
            loads.set_engines(slots, ())
            loads.changed()
        for changed in ({"e0"}, {"e199"}, {"e15", "e16"}, {"e3", "e77", "e140"}):
            for name in changed:
                one.add(name, 1, 1, 1)
            assert set(two.changed()) == set()  # so soon it does not look
            two.look()
            assert set(two.changed()) == changed
            now += LOOK_S
            assert set(two.changed()) == set()
        for bell in bells:
            os.close(bell)


def test_load_that_falls_rings_who_waits_and_once() -> None:
    with Tables(2) as tables:
        (one, sessions), two = tables.of(0), Doorbell(tables.state, tables.bells, 1)
        mine = Doorbell(tables.state, tables.bells, 0)
        one.add("a", 1, 10, 0)
        one.add("a", -1, -10, 0)
        assert not readable(two.fd)  # it does not wait
        assert two.listen()
        assert not two.listen()
        one.add("a", 1, 10, 0)
        assert not readable(two.fd)
        one.add("a", -1, -10, 0)
        assert readable(two.fd)
        two.answer()
        one.add("a", -1, -10, 0)
        assert not readable(two.fd)
        sessions.settle("s", "a", 10, 1.0, seen=None)
        assert two.listen()
        assert mine.listen()
        sessions.drop("s")
        assert readable(two.fd)
        assert not readable(mine.fd)  # nobody wakes himself


def test_placements_of_two_processes_agree_and_see_each_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.shared_loads.LOOK_S", 0.0)
    with Tables(2) as tables:
        both: list[Placement] = []
        for i in range(2):
            loads, sessions = tables.of(i)
            both.append(Placement(PlacementOptions(policies=("sticky-least-loaded",)), sessions=sessions, board=loads))
            both[i].set_engines(entries(*ENGINES))
        homes: dict[str, str] = {}
        for turn in range(4):
            for i in range(30):
                request = Hints(session_id=f"s{i}", prompt_tokens=100)
                placed = both[(i + turn) % 2].place(request, 1.0 + turn)
                assert isinstance(placed, str)
                assert homes.setdefault(f"s{i}", placed) == placed
                if turn:
                    both[(i + turn) % 2].done(request, placed, 1.0 + turn, ok=True)
            if not turn:
                assert sorted(homes.values()) == sorted(ENGINES * 10)  # as even as one process makes it
                for placement in both:
                    assert [view.outstanding for view in placement.views().values()] == [10, 10, 10]
                for i in range(30):
                    both[i % 2].done(Hints(session_id=f"s{i}", prompt_tokens=100), homes[f"s{i}"], 1.5, ok=True)
        for placement in both:
            assert [(v.outstanding, v.resident_tokens) for v in placement.views().values()] == [(0, 1000)] * 3


def test_load_that_rose_and_fell_between_two_looks_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of the other process that was in flight for less than a look's time stayed in views for good."""
    now = 1.0
    monkeypatch.setattr("penstock.router.shared_loads.time", SimpleNamespace(monotonic=lambda: now))
    with Tables(2) as tables:
        options = PlacementOptions(policies=("round-robin",))
        tabled = [tables.of(i) for i in range(2)]
        one, two = (Placement(options, sessions=sessions, board=loads) for loads, sessions in tabled)
        for placement in (one, two):
            placement.set_engines(entries(*ENGINES))
        request, session = Hints(), Hints(session_id="s", prompt_tokens=100)
        first = one.place(request, now)  # looks at what the other has
        assert isinstance(first, str)
        one.done(request, first, now, ok=True)
        now += LOOK_S / 4
        others = [(each, two.place(each, now)) for each in (request, request, request, session)]
        now += LOOK_S / 4
        second = one.place(request, now)  # too soon for another look
        assert isinstance(second, str)
        for each, engine in others:
            assert isinstance(engine, str)
            two.done(each, engine, now, ok=True)
        two.finish_session("s")
        one.done(request, second, now, ok=True)
        now += 1.0
        tabled[0][0].look()
        assert [(view.outstanding, view.resident_tokens) for view in one.views().values()] == [(0, 0)] * len(ENGINES)


def readable(file: Any, seconds: float = 0.0) -> bool:
    return bool(select.select([file], [], [], seconds)[0])
