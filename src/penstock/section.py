"""Sections of the configuration: their base, what is wrong with one in one line, and YAML in which no key is twice."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import ConfigError

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of every section: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def validate(section: type[S], values: Mapping[str, Any]) -> S:
    """Build one section; pydantic's errors become one `ConfigError` line."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(section, dict(e)) for e in error.errors())) from None


def _explain(section: type[Section], error: Mapping[str, Any]) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        known = sorted(_fields_at(section, location[:-1]))
        near = difflib.get_close_matches(location[-1], known, n=1)
        near = near or [name for name in _keys(section) if name.endswith(f".{location[-1]}")][:1]
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown config key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"config key {key!r} is required"
    named = f"config key {key!r}: " if key else ""
    given = error["input"]
    # A check across keys names the ones it means; its input is a whole section, perhaps with keys that are secret.
    got = "" if error["type"] == "value_error" and isinstance(given, (Mapping, Section)) else f", got {given!r}"
    return f"{named}{str(error['msg']).removeprefix('Value error, ')}{got}"


def _fields_at(section: type[Section], path: Sequence[str]) -> list[str]:
    current: type[BaseModel] = section
    for part in path:
        if part.isdigit():  # an index: the step before led to the list's items
            continue
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        kinds = (annotation, *get_args(annotation))
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return []
        current = inner[0]
    return list(current.model_fields)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of a tree, with its section before it."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def read_yaml(text: str) -> object:
    """Read a YAML text. ConfigError: a key is given twice in one mapping; yaml.YAMLError: it is no YAML."""
    return yaml.load(text, Loader=_Once)  # noqa: S506 - it is a safe loader


class _Once(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # The mapping as written. Later, the keys of a merge stand in it before the keys that override them.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise ConfigError(f"config line {key.start_mark.line + 1}: {key.value!r} is given twice; take one out")
            seen.add((key.tag, key.value))
        return node
