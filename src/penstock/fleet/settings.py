"""Keyword options of `launch` and `connect` to the validated sections that they belong to."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from penstock.config import Section, validate
from penstock.errors import ConfigError

S = TypeVar("S", bound=Section)


def section(kind: type[S], given: S | None, options: Mapping[str, Any]) -> S:
    """A section from what was given whole, with the options that are fields of it put over it.

    Raises:
        ConfigError: a value of the wrong type or out of range, or a required one missing.
    """
    base = given.model_dump() if given is not None else {}
    return validate(kind, base | {name: value for name, value in options.items() if name in kind.model_fields})


def refuse_unknown(options: Mapping[str, Any], *kinds: type[Section]) -> None:
    """Raise ConfigError for the first option that is a field of no section, with the nearest one that is."""
    known = sorted({name for kind in kinds for name in kind.model_fields})
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}; {hint}")
