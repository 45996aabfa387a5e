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
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As it is written: later, what a merge key brings stands before the keys that override it."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise ConfigError(f"config line {key.start_mark.line + 1}: {key.value!r} is given twice; take one out")
            seen.add((key.tag, key.value))
        return node
