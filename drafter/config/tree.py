"""A config file and its `section.key=value` overrides as one tree, before its keys are validated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from drafter import user_files
from drafter.config import strict_yaml
from drafter.config.fields import in_home
from drafter.errors import ConfigError


def read_tree(path: str | Path, overrides: Sequence[str], root: Path) -> dict[str, Any]:
    """Values of overrides are YAML, or `@FILE` (relative to `root`) for the YAML in a file. Raises ConfigError."""
    try:
        tree = strict_yaml.load(user_files.read_text(Path(path)))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must be a mapping of sections")
    for override in overrides:
        _apply(tree, override, root)
    return tree


def _apply(tree: dict, override: str, root: Path) -> None:
    key, found, text = override.partition("=")
    if not found:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    *parents, last = key.split(".")
    try:
        value = _value(text, root)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override}: the value is not YAML: {' '.join(str(error).split())[:300]}") from None
    node: Any = tree
    try:
        for part in parents:
            node = node[_index(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[_index(last) if isinstance(node, list) else last] = value
    except (ValueError, IndexError, TypeError, AttributeError):
        raise ConfigError(f"--set {override}: the config has no such key") from None


def _index(text: str) -> int:
    """Raises ValueError unless the text consists of ASCII digits."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def _value(text: str, root: Path) -> Any:
    """The value of YAML text, or of the file that `@FILE` names."""
    if not text.startswith("@"):
        return strict_yaml.load(text)
    path = root / in_home(text[1:])
    try:
        return strict_yaml.load(user_files.read_text(path))
    except OSError as error:
        raise ConfigError(f"--set: {path} cannot be read ({error.strerror})") from None
