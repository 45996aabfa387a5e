"""A policy with SQLite: `environment.name: sql:Sql`, with this folder on the path."""

import contextlib
import json
import random
import sqlite3
from collections.abc import Sequence

from penstock.rollout.environment import DrawnTasks, Response, Task, Turn

CITIES = ("Bern", "Graz", "Lyon", "Turin", "Ghent", "Porto")
MOST_STEPS = 100_000
"""SQLite's instructions for one query, in hundreds; a policy writes endless ones too."""
MOST_ROWS = 20


class Sql(DrawnTasks):
    """Questions about a small table that only a query can answer."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "query",
                "description": "Run one SQLite query. Table: orders(city TEXT, amount INTEGER).",
                "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
            },
        },
    )

    def __init__(self, *, seed: int, rows: int = 30) -> None:
        super().__init__(seed=seed)
        self.rows = rows

    def reward(self, task: Task, response_text: str) -> float:
        """1 if the answer is in the last response."""
        return float(task.metadata["answer"] in response_text.split())

    async def step(self, task: Task, responses: Sequence[Response]) -> Turn | None:
        """Answer each call with the rows of its query; an answer without a call ends the episode."""
        calls = responses[-1].calls
        if not calls:
            return None
        results = [run(arguments, task.metadata["orders"]) for _, arguments in calls]
        return Turn([{"role": "tool", "content": result, "name": "query"} for result in results])

    def draw(self, rng: random.Random) -> Task:
        """A sum over the orders of one city."""
        orders = [(rng.choice(CITIES), rng.randint(1, 99)) for _ in range(self.rows)]
        city, number = rng.choice(CITIES), rng.randint(0, 10**6)
        answer = sum(amount for name, amount in orders if name == city)
        prompt = f"Order book {number}: what is the sum of the amounts of {city}?"
        return Task(f"{number}/{city}", prompt, {"answer": str(answer), "orders": orders})


def run(arguments: str, orders: Sequence[tuple[str, int]]) -> str:
    """Rows of the query in `{"sql": ...}` as JSON, or what is wrong with it."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("create table orders (city text, amount integer)")
        db.executemany("insert into orders values (?, ?)", orders)
        db.execute("pragma query_only = on")
        db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # no file of this machine can be read
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        left = [MOST_STEPS]

        def count() -> bool:
            left[0] -= 100
            return left[0] <= 0

        db.set_progress_handler(count, 100)
        try:
            return json.dumps(db.execute(str(json.loads(arguments)["sql"])).fetchmany(MOST_ROWS))
        except (ValueError, KeyError, TypeError, sqlite3.Error, sqlite3.Warning) as error:
            return f"error: {error}"
