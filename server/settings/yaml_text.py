# SPDX-License-Identifier: Apache-2.0
"""YAML that people write: a key that is repeated is refused, of which yaml would keep the last."""

from __future__ import annotations

from typing import Any

import yaml


class RepeatedKeyError(yaml.YAMLError):
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, before what it merges from others is entered."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # not hashable, which is refused
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise RepeatedKeyError(
                    f"{key.value} is given twice, in line {lines[name]} and in line {line}; leave "
                    "one of them out"
                )
            lines[name] = line
        return node


def load_yaml(text: str) -> Any:
    """Return what `text` holds: numbers, texts, lists and mappings alone.

    Raises `RepeatedKeyError` if a mapping has a key twice, with both lines, and another
    `yaml.YAMLError` if `text` is no YAML.
    """
    return yaml.load(text, _Loader)
