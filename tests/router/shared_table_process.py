"""A process that uses the shared tables as it is told: a JSON list `[method, *arguments]` a line, an answer each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fcntl import LOCK_EX, lockf
from typing import Any

from penstock.router.doorbell import Doorbell
from penstock.router.shared_loads import SharedLoads
from penstock.router.shared_sessions import SharedSessions
from penstock.router.shared_state import Layout, SharedState


def main(fd: int, process: int, workers: int, engines: int, sessions: int, bells: Sequence[int]) -> None:
    state = SharedState(fd, Layout(workers, engines, sessions))
    loads = SharedLoads(state, process, Doorbell(state, bells, process))
    table = SharedSessions(state, loads)

    def engines_are(homes: dict[str, int], slots: dict[str, int], lost: list[str]) -> None:
        loads.set_engines(slots, lost)
        table.set_engines(homes)

    def changed() -> list[str]:
        loads.look()
        return sorted(loads.changed())

    def get(session: str) -> list[Any] | None:
        record = table.get(session)
        return None if record is None else [record.engine, record.tokens, record.used]

    def settle(session: str, engine: str, tokens: int, now: float, seen: str | None) -> str:
        return table.settle(session, engine, tokens, now, seen=seen)

    methods: dict[str, Any] = {
        "engines": engines_are,
        "get": get,
        "settle": settle,
        "settle_all": lambda ids, engine, now: [settle(each, engine, 1, now, None) for each in ids],
        "touch": table.touch,
        "drop": table.drop,
        "expire": lambda idle, gone: table.expire(idle_before=idle, gone_before=gone),
        "counts": table.counts,
        "add": loads.add,
        "totals": loads.totals,
        "changed": changed,
        "lock": lambda: lockf(fd, LOCK_EX, state.layout.buckets),
    }
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(methods[method](*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    numbers = list(map(int, sys.argv[1:]))
    main(*numbers[:5], numbers[5:])
