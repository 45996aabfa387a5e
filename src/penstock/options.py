"""Checks of options that a user gives, with errors of one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from penstock.checks import did_you_mean
from penstock.errors import ConfigError
from penstock.router_settings import Section

S = TypeVar("S", bound=Section)
T = TypeVar("T")


def validate(section: type[T], values: Mapping[str, Any], offered: Collection[str] = ()) -> T:
    """Build one section or pydantic dataclass; its errors become a `ConfigError` line.

    A hint names keys of the `offered` sections alone; empty: of all.
    """
    try:
        return TypeAdapter(section).validate_python(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(section, dict(e), offered) for e in error.errors())) from None


def _explain(section: type[Any], error: Mapping[str, Any], offered: Collection[str]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        *above, name = (part for part in error["loc"] if isinstance(part, str))  # the others are list indices
        keys = [(key.split("."), key) for key in _keys(section) if not offered or key.partition(".")[0] in offered]
        here = [path[-1] for path, _ in keys if path[:-1] == above]
        elsewhere = [key for path, key in keys if path[-1] == name and not above[1:]]
        return f"unknown config key {key!r}; {did_you_mean(name, here, 'known here', elsewhere)}"
    if error["type"] == "missing":
        return f"config key {key!r} is required"
    named = f"config key {key!r}: " if key else ""
    given: object = error["input"]
    # A check across keys names those keys itself. Its input is a whole section, which may hold secret keys.
    is_list = error["type"] in {"list_type", "tuple_type"}
    message = "must be a list, such as [a, b]" if is_list else str(error["msg"]).removeprefix("Value error, ")
    whole = error["type"] == "value_error" and isinstance(given, (Mapping, Section))
    shown = repr(cast("object", given))
    got = "" if whole or shown in message else f", got {shown}"
    return without_password(f"{named}{message}{got}")


def without_password(text: str) -> str:
    """Hide user and password of the URLs in a text."""
    return re.sub(r"//\S*@", "//***@", text)


def _keys(section: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield every key of a tree, prefixed with its section."""
    for name, field in section.__pydantic_fields__.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _keys(kind, f"{prefix}{name}.")


def section(kind: type[S], given: S | None, options: Mapping[str, Any]) -> S:
    """Return a section: the one given, with the options that are its fields on top.

    Raises:
        ConfigError: a value of the wrong type or out of range, or a required one missing.
    """
    if not isinstance(given, kind | None):
        raise ConfigError(f"give a {kind.__name__}, not {given!r}; or its fields as options of their own")
    base = given.model_dump() if given is not None else {}
    return validate(kind, base | {name: value for name, value in options.items() if name in kind.model_fields})


def refuse_unknown(options: Mapping[str, Any], *kinds: type[Section]) -> None:
    """Raise ConfigError for an option that is no field, with the nearest field."""
    known = sorted({name for kind in kinds for name in kind.model_fields})
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; {did_you_mean(name, known)}")


def check_key(api_key: object) -> None:
    """Raise ConfigError for an API key that no request can carry, without showing it."""
    if api_key is not None and not isinstance(api_key, str):
        raise ConfigError(f"api_key must be a string, not of type {type(api_key).__name__}")
    if api_key and any(ord(letter) < ord(" ") or letter == "\x7f" for letter in api_key):
        raise ConfigError("api_key has a line break or another control character in it; strip what was read of a file")
