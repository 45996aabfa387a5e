"""Checks of data from files, sockets and callers, which turn what is malformed into an error of ours."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

from penstock.errors import PenstockError, UserError

Refusal = Callable[[str], PenstockError]
"""Makes an error from a message: an error class, or a function."""

LARGEST = 2**63 - 1
"""Upper bound of every number that Penstock accepts."""
_SHOWN = 200


def parse_json(
    data: bytes | memoryview | str, what: str, error: Refusal = UserError, *, loads: Callable[[Any], Any] = orjson.loads
) -> Any:
    """Parse a JSON text; on bad or too deep JSON, raise `error` that names `what`.

    `loads` is `json.loads` for texts that may hold NaN or numbers of more than 64 bits.
    """
    try:
        return loads(data)
    except (ValueError, RecursionError) as problem:
        raise error(f"{what} is not JSON that can be read: {problem}") from problem


@contextmanager
def reading(what: str, error: Refusal = UserError) -> Generator[None]:
    """Turn the errors of reading unexpected data into one error that names `what`."""
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
    """Return `value` if it is an int, no bool, from `least` to `most`; or raise `error`."""
    if type(value) is not int or not least <= value <= most:
        raise error(f"{what} is a whole number from {least} to {most}, got {repr(value)[:_SHOWN]}")
    return value


def did_you_mean(name: str, known: Iterable[str], all_of: str = "known", elsewhere: Sequence[str] = ()) -> str:
    """Return a hint: `elsewhere` and the known name nearest to a wrong one, or else all known names."""
    names = list(known)
    near = [*elsewhere, *difflib.get_close_matches(name, names, n=1)]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"{all_of}: {', '.join(names) or 'none'}"
