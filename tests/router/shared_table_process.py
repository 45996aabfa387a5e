"""A process that uses the shared tables as it is told: a JSON list `[method, *arguments]` a line, an answer each."""

from __future__ import annotations

import json
import sys
from fcntl import LOCK_EX, lockf
from typing import Any

from penstock.router.load_board import LoadBoard
from penstock.router.shared_sessions import SharedSessions
from penstock.router.shared_state import Layout, SharedState


def main(fd: int, process: int, workers: int, engines: int, sessions: int, ttl_s: float) -> None:
    state = SharedState(fd, Layout(workers, engines, sessions))
    board = LoadBoard(state, process)
    table = SharedSessions(state, board, ttl_s=ttl_s)

    def settle_all(ids: list[str], engine: str, now: float) -> list[str]:
        return [table.settle(each, engine, 1, now, seen=None) for each in ids]

    def engines_are(homes: dict[str, int]) -> None:
        board.set_engines(homes)
        table.set_engines(homes)

    methods: dict[str, Any] = {
        "get": table.get,
        "settle": lambda session, engine, tokens, now, seen: table.settle(session, engine, tokens, now, seen=seen),
        "settle_all": settle_all,
        "touch": table.touch,
        "drop": table.drop,
        "expire": table.expire,
        "engines": engines_are,
        "add": board.add,
        "total": board.total,
        "changed": board.changed,
        "lock": lambda: lockf(fd, LOCK_EX, state.layout.buckets),
    }
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(methods[method](*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]), float(sys.argv[6]))
