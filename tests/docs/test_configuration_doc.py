"""docs/reference/configuration.md says of every key of the config tree what is true, and of no other."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import yaml

from penstock.config import RunConfig
from penstock.router_settings import Section

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def documented() -> dict[str, tuple[str, str]]:
    """Key with its section to default and meaning, from the tables."""
    found: dict[str, tuple[str, str]] = {}
    section = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"###? (.+)", line):
            section = "" if heading[1] == "The run" else f"{heading[1]}."
        elif row := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+) \|", line):
            assert section + row[1] not in found, f"{section}{row[1]} is there twice"
            found[section + row[1]] = (row[2], row[3])
    return found


def keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, typing.Any]]:
    """Every key of the tree: its name, its default as YAML, its type."""
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from keys(annotation, f"{prefix}{name}.")
            continue
        if field.is_required():
            default = "required"
        else:
            value = section.model_construct().model_dump(mode="json", include={name})[name]
            default = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
        yield prefix + name, default, annotation
        kinds = typing.get_args(annotation)
        for inner in kinds if type(None) in kinds else ():  # a section that may be absent
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from keys(inner, f"{prefix}{name}.")


def test_keys_and_defaults_are_those_of_the_config() -> None:
    assert {key: default for key, (default, _) in documented().items()} == {key: default for key, default, _ in keys()}


def test_every_choice_is_named() -> None:
    meanings = documented()
    for key, _, annotation in keys():
        if typing.get_origin(annotation) is typing.Literal:
            for choice in typing.get_args(annotation):
                assert f"`{choice}`" in meanings[key][1] or choice == meanings[key][0], f"{key}: {choice}"
