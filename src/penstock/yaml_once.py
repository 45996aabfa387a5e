"""YAML in which a key is given once: of two, YAML's own loader takes the last and says nothing."""

from __future__ import annotations

from typing import Any

import yaml

from penstock.errors import ConfigError


def read_yaml(text: str) -> object:
    """What a YAML text holds.

    Raises:
        yaml.YAMLError: it is no YAML.
        ConfigError: a key is given twice in one mapping.
    """
    return yaml.load(text, Loader=_Once)  # noqa: S506 - it is a safe loader


class _Once(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise ConfigError(f"config line {key.start_mark.line + 1}: {key.value!r} is given twice; take one out")
            seen.add(key.value)
        return super().construct_mapping(node, deep)
