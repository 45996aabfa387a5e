"""Read data of files and sockets so that anything wrong with it is one named error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import orjson

from penstock.errors import PenstockError, UserError

Refusal = Callable[[str], PenstockError]
"""Makes the error of a message: a class of the family, or a function."""

LARGEST = 2**63 - 1
"""What every number of ours fits into."""
_SHOWN = 200


def parse_json(
    data: bytes | memoryview | str, what: str, error: Refusal = UserError, *, loads: Callable[[Any], Any] = orjson.loads
) -> Any:
    """Parse a JSON text.

    Args:
        data: the text.
        what: it is, for the message.
        error: makes the error to raise if it is no JSON, or nested too deeply.
        loads: `json.loads` where NaN and numbers of more than 64 bits may be in it.
    """
    try:
        return loads(data)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not JSON that can be read: {problem}") from problem


@contextmanager
def reading(what: str, error: Refusal = UserError) -> Generator[None]:
    """Turn what unexpected data raises while it is taken apart into one error that names `what`."""
    try:
        yield
    except PenstockError:
        raise
    except KeyError as problem:
        missing = repr(problem.args[0] if problem.args else "a key")[:_SHOWN]
        raise error(f"malformed {what}: {missing} is missing") from problem
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        raise error(f"malformed {what}: {repr(problem)[:_SHOWN]}") from problem


def whole_number(value: Any, what: str, *, least: int = 0, most: int = LARGEST, error: Refusal = UserError) -> int:
    """Return `value` if it is an int, no bool, from `least` to `most`; else raise `error`."""
    if type(value) is not int or not least <= value <= most:
        raise error(f"{what} is a whole number from {least} to {most}, got {repr(value)[:_SHOWN]}")
    return value
