"""A policy with a calculator: `environment.name: calculator:Calculator`, with this folder on the path."""

import ast
import json
import operator
import random
from collections.abc import Sequence

from penstock.rollout.environment import DrawnTasks, Response, Task, Turn

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 200
"""Characters of an expression; a policy writes anything."""


class Calculator(DrawnTasks):
    """Products of two numbers that are hard to say without the tool."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "calculate",
                "description": "Compute an expression of whole numbers with + - *.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self, *, seed: int, largest: int = 999) -> None:
        super().__init__(seed=seed)
        self.largest = largest

    def reward(self, task: Task, response_text: str) -> float:
        """1 if the answer is in the last response."""
        return float(task.metadata["answer"] in response_text)

    async def step(self, task: Task, responses: Sequence[Response]) -> Turn | None:
        """Answer each call with a message of the role `tool`; an answer without a call ends the episode."""
        del task
        calls = responses[-1].calls
        if not calls:
            return None
        results = [evaluate(arguments) for _, arguments in calls]
        return Turn([{"role": "tool", "content": result, "name": "calculate"} for result in results])

    def draw(self, rng: random.Random) -> Task:
        """A product."""
        a, b = rng.randint(2, self.largest), rng.randint(2, self.largest)
        return Task(f"{a}*{b}", f"What is {a} * {b}?", {"answer": str(a * b)})


def evaluate(arguments: str) -> str:
    """The value of `{"expression": ...}`, or what is wrong with it."""
    try:
        expression = str(json.loads(arguments)["expression"])[:LONGEST]
        return str(_value(ast.parse(expression, mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers with + - * are computed")
