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
from typing import Any, Self

from penstock.router.doorbell import Doorbell, make_bells
from penstock.router.load_board import EngineHomes, Load, LoadBoard
from penstock.router.shared_sessions import SharedSessions
from penstock.router.shared_state import WAYS, Layout, SharedState

ENGINES = ("a", "b", "c")


class Tables:
    """The shared tables, with the hub's own row."""

    def __init__(self, workers: int = 0, *, sessions: int = 1024, ttl_s: float = 1000.0) -> None:
        self.layout = Layout(workers, 8, sessions)
        self.state = SharedState.create(self.layout)
        self.board = LoadBoard(self.state, workers)
        self.sessions = SharedSessions(self.state, self.board, ttl_s=ttl_s)
        self.homes = EngineHomes(8)
        self.engines(*ENGINES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.state.close()

    def engines(self, *names: str) -> dict[str, int]:
        left = self.homes.assign(names)
        self.board.set_engines(self.homes.homes)
        self.sessions.set_engines(self.homes.homes)
        return left


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


@contextmanager
def processes(count: int, **options: Any) -> Iterator[tuple[Tables, list[Process]]]:
    with ExitStack() as stack:
        tables = stack.enter_context(Tables(count, **options))
        started: list[Process] = []
        script = str(Path(__file__).with_name("shared_table_process.py"))
        for i in range(count):
            layout = tables.layout
            arguments = (tables.state.fd, i, count, layout.engines, layout.sessions, options.get("ttl_s", 1000.0))
            child = subprocess.Popen(
                [sys.executable, script, *map(str, arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(tables.state.fd,),
            )  # fmt: skip
            stack.callback(child.wait, 10)
            stack.callback(child.kill)
            stack.enter_context(child.stdin)  # type: ignore[arg-type]
            stack.enter_context(child.stdout)  # type: ignore[arg-type]
            started.append(Process(child))
        for process in started:
            process("engines", tables.homes.homes)
        yield tables, started


def loads(sessions: dict[str, tuple[str, int, float]]) -> dict[str, tuple[int, int]]:
    return {
        engine: (
            sum(h == engine for h, _, _ in sessions.values()),
            sum(t for h, t, _ in sessions.values() if h == engine),
        )
        for engine in ENGINES
    }


def test_random_calls_of_three_processes_are_those_of_a_dict() -> None:
    dice = random.Random(7)
    ttl = 50.0
    ids = [f"s{i}" for i in range(60)]
    with processes(3, sessions=1024, ttl_s=ttl) as (tables, workers):
        model: dict[str, tuple[str, int, float]] = {}
        now = 1000.0
        for _ in range(1500):
            now += dice.random()
            worker = dice.choice(workers)
            session = dice.choice(ids)
            if session in model and model[session][2] + ttl < now:
                del model[session]
            home = model[session][0] if session in model else None
            match dice.randrange(6):
                case 0 | 1:
                    found = worker("get", session, now)
                    assert found == (None if home is None else [home, model[session][1]])
                case 2 | 3:
                    seen, engine, tokens = dice.choice([home, None, "b"]), dice.choice(ENGINES), dice.randrange(1000)
                    wins = home is None or home in {seen, engine}
                    assert worker("settle", session, engine, tokens, now, seen) == (engine if wins else home)
                    if wins:
                        model[session] = (engine, tokens, now)
                case 4:
                    worker("touch", session, now)
                    if home is not None:
                        model[session] = (home, model[session][1], now)
                case _:
                    assert worker("drop", session, now) is (home is not None)
                    model.pop(session, None)
        tables.sessions.expire(now)
        model = {name: entry for name, entry in model.items() if entry[2] + ttl >= now}
        assert len(model) > 10  # or nothing was tried
        for engine, (count, tokens) in loads(model).items():
            expected = Load(sessions=count, session_tokens=tokens)
            assert tables.board.total(engine) == expected
            assert [Load(*worker("total", engine)) for worker in workers] == [expected] * 3


def test_processes_that_settle_the_same_sessions_at_once_agree() -> None:
    ids = [f"s{i}" for i in range(3000)]
    with processes(3, sessions=65536) as (tables, workers):
        for i, (worker, engine) in enumerate(zip(workers, ENGINES, strict=True)):
            worker.start("settle_all", ids[i * 1000 :] + ids[: i * 1000], engine, 1.0)
        decided = [worker.finish() for worker in workers]
        decided = [d[-i * 1000 :] + d[: -i * 1000] if i else d for i, d in enumerate(decided)]
        assert decided[0] == decided[1] == decided[2]
        assert len(set(decided[0])) == 3  # each of them was the first somewhere
        for engine in ENGINES:
            assert tables.board.total(engine).sessions == decided[0].count(engine)


def test_a_process_that_dies_in_a_change_does_not_block_the_others() -> None:
    with processes(2) as (tables, (one, two)):
        tables.sessions.settle("s", "a", 1, 1.0, seen=None)
        one("lock")  # it is changing every bucket
        two.start("settle", "s", "b", 2, 2.0, "a")
        assert not readable(two.child.stdout, 0.1)
        assert tables.sessions.get("s", 2.0) == ("a", 1)  # who only reads is not held up
        one.child.kill()
        assert two.finish() == "b"
        one.child.wait()
        tables.board.bury(0)
        assert tables.board.total("a") == Load()
        assert tables.board.total("b") == Load(sessions=1, session_tokens=2)


def test_the_least_recently_used_session_of_a_full_bucket_goes() -> None:
    with Tables(sessions=WAYS) as tables:  # one bucket
        for i in range(WAYS):
            tables.sessions.settle(f"s{i}", "a", 10, float(i), seen=None)
        tables.sessions.touch("s0", 100.0)
        tables.sessions.settle("new", "b", 5, 101.0, seen=None)
        assert tables.sessions.get("s1", 101.0) is None
        assert tables.sessions.get("s0", 101.0) == ("a", 10)
        assert tables.sessions.get("new", 101.0) == ("b", 5)
        assert tables.board.total("a") == Load(sessions=WAYS - 1, session_tokens=10 * (WAYS - 1))


def test_sessions_of_an_engine_that_left_do_not_pass_to_the_one_in_its_slot() -> None:
    with Tables() as tables:
        tables.sessions.settle("s", "a", 10, 1.0, seen=None)
        tables.board.add("a", 1, 100, 0)
        left = tables.engines("b", "c")
        assert tables.sessions.get("s", 1.0) is None
        tables.board.add("a", -1, -100, 0)  # its last request ends
        tables.board.clear(left.values())
        tables.homes.free(left)
        for _ in range(8):  # until the slot is given again
            tables.homes.free(tables.engines("b", "c"))
            tables.homes.free(tables.engines("b", "c", "new"))
        assert tables.board.total("new") == Load()
        assert tables.sessions.get("s", 1.0) is None
        assert tables.sessions.settle("s", "new", 3, 1.0, seen=None) == "new"
        assert tables.board.total("new") == Load(sessions=1, session_tokens=3)
        assert tables.sessions.expire(1.0) == 0


def test_what_a_dead_process_had_in_flight_is_gone_and_its_sessions_stay() -> None:
    with processes(2) as (tables, (one, two)):
        one("settle", "s", "a", 10, 1.0, None)
        two("settle", "t", "a", 7, 1.0, None)
        one("add", "a", 3, 300, 30)
        two("add", "a", 1, 100, 0)
        assert tables.board.total("a") == Load(4, 400, 30, 2, 17)
        assert two("changed") is True
        assert two("changed") is False
        one.child.kill()
        one.child.wait()
        tables.board.bury(0)
        assert two("changed") is True
        assert Load(*two("total", "a")) == Load(1, 100, 0, 2, 17)
        assert two("drop", "s", 2.0) is True
        assert Load(*two("total", "a")) == Load(1, 100, 0, 1, 7)


def test_figures_of_an_engine_are_one_for_all() -> None:
    with Tables(1) as tables:
        other = LoadBoard(tables.state, 0)
        other.set_engines(tables.homes.homes)
        assert tables.board.figures("a") == (-1.0, 0)
        other.set_figures("a", 0.25, 4096)
        assert tables.board.figures("a") == (0.25, 4096)
        other.set_figures("a", 0.0, 4096)
        assert tables.board.figures("a") == (0.0, 4096)
        assert tables.board.figures("b") == (-1.0, 0)


def test_the_doorbell_wakes_who_listens_once() -> None:
    with Tables(2) as tables:
        bells = make_bells(3)
        one, two = (Doorbell(tables.state, bells, i) for i in (0, 1))
        one.ring()
        assert not readable(two.fd)  # it did not listen
        two.listen()
        one.ring()
        one.ring()
        assert readable(two.fd)
        two.answer()
        assert not readable(two.fd)
        one.ring()
        assert not readable(two.fd)
        one.listen()
        one.ring()
        assert not readable(one.fd)  # nobody wakes himself
        for bell in bells:
            os.close(bell)


def readable(file: Any, seconds: float = 0.0) -> bool:
    return bool(select.select([file], [], [], seconds)[0])
