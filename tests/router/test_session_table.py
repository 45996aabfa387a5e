"""The table of sessions, as one process has it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.memory import Engine, EngineEntry, SessionTable


def home(sessions: SessionTable, session_id: str) -> str | None:
    record = sessions.get(session_id)
    return None if record is None or record.engine.left else record.engine.name


class Model:
    """The table in as few words as possible: engine, tokens, used and whether it counts, in order of use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[str, tuple[str | None, int, float, bool]] = {}

    def settle(self, session: str, engine: str, tokens: int, now: float) -> None:
        self.rows.pop(session, None)
        if len(self.rows) == self.capacity:
            del self.rows[next(iter(self.rows))]
        self.rows[session] = (engine, tokens, now, True)

    def touch(self, session: str, now: float) -> None:
        row = self.rows.get(session)
        if row is not None and row[3]:
            del self.rows[session]
            self.rows[session] = (row[0], row[1], now, True)

    def forget_engine(self, engine: str) -> None:
        self.rows = {s: (None, 0, *row[2:]) if row[0] == engine else row for s, row in self.rows.items()}

    def expire(self, idle_before: float, gone_before: float) -> None:
        kept = {s: row for s, row in self.rows.items() if row[2] >= gone_before}
        self.rows = {s: (*row[:3], row[3] and row[2] >= idle_before) for s, row in kept.items()}

    def counts(self, engine: str) -> tuple[int, int]:
        there = [row for row in self.rows.values() if row[0] == engine]
        return len(there), sum(row[1] for row in there if row[3])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["settle", "settle", "touch", "drop", "forget", "expire"]),
            st.sampled_from("abcdef"),
            st.sampled_from(["e0", "e1"]),
            st.integers(1, 50),
        ),
        max_size=60,
    )
)
def test_counts_are_those_of_a_plain_model(steps: list[tuple[str, str, str, int]]) -> None:
    sessions, model = SessionTable(capacity=4), Model(capacity=4)
    engines = {name: Engine(EngineEntry(name, "http://h:1")) for name in ("e0", "e1")}
    for now, (step, session, engine, tokens) in enumerate(steps):
        match step:
            case "settle":
                sessions.record(session, engines[engine], tokens, now)
                model.settle(session, engine, tokens, now)
            case "touch":
                sessions.touch(session, now)
                model.touch(session, now)
            case "drop":
                assert (sessions.drop(session) is None) == (model.rows.pop(session, None) is None)
            case "forget":
                engines[engine].left = True
                engines[engine] = Engine(EngineEntry(engine, "http://h:2"))
                model.forget_engine(engine)
            case _:
                sessions.expire(idle_before=now - tokens, gone_before=now - 2 * tokens)
                model.expire(now - tokens, now - 2 * tokens)
        assert len(sessions) == len(model.rows)
        for name in ("e0", "e1"):
            assert (engines[name].sessions, engines[name].context) == model.counts(name)
        for name in "abcdef":
            assert home(sessions, name) == (model.rows[name][0] if name in model.rows else None)
