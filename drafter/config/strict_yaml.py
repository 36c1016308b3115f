"""YAML without surprises: no duplicate keys, only decimal numbers, and only values that can be written again.

PyYAML reads YAML 1.1, in which 12:30 is 750, 010 is 8, 2026-11-30 is a date, 1e-3 is text, and the last of two equal
keys wins. Here 1e-3 is a number and the other three are text.
"""

import re
from typing import Any

import yaml

LARGEST = 10**6  # values of a config
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
MERGE, TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
NUMBERS = (
    (INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789"),
    (
        FLOAT,
        re.compile(
            r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    """Raises yaml.MarkedYAMLError with the line."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Refuse tags: !!int would bring back the numbers that this module excludes."""
        event = self.peek_event()
        if (tag := getattr(event, "tag", None)) and tag != "!":
            raise yaml.composer.ComposerError(None, None, f"a tag in line {event.start_mark.line + 1}: leave it out")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Refuse duplicate keys in a mapping; a key that `<<` merges may be overridden."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if first := lines.get(key.value):
                    why = f"the key {key.value} is given twice, in line {first} and line {line}: remove one"
                    raise yaml.composer.ComposerError(None, None, why)
                lines[key.value] = line
        return node

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        value = super().construct_scalar(node)
        try:
            if "\0" in value:
                raise ValueError
            value.encode()
        except ValueError:
            why = f"a text in line {node.start_mark.line + 1} has a NUL byte or half a character"
            raise yaml.constructor.ConstructorError(None, None, why) from None
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would not read back as text."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (INT, FLOAT, TIMESTAMP)]
        for first, known in _class.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern, _first in NUMBERS:
        _class.add_implicit_resolver(_tag, _pattern, list(_first))


def load(text: str) -> Any:
    """Raises yaml.YAMLError, ValueError or RecursionError for invalid YAML."""
    value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    if _size(value, {}) > LARGEST:
        raise ValueError(f"with aliases expanded it has more than {LARGEST:,} values")
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Number of values in a tree with all aliases expanded; more than LARGEST for a tree that contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = LARGEST + 1
        known[id(value)] = 1 + sum(
            _size(each, known) for each in (value.values() if isinstance(value, dict) else value)
        )
    return known[id(value)]


def dump(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
