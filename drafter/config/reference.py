"""Every setting of a config with its default and its meaning: `python -m drafter.config`."""

import argparse
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drafter.cli import Parser
from drafter.config import Config


class Setting(NamedTuple):
    """`key` has N for a position in a list; `default` is YAML, or `required`."""

    key: str
    default: str
    meaning: str


def settings() -> list[Setting]:
    """In the order in which they are defined; the settings of a section that occurs again are listed once."""
    return list(_settings(Config, "", {}))


def _settings(section: type[BaseModel], prefix: str, seen: dict[type, str]) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        key = prefix + name + (".N" if get_origin(field.annotation) is tuple and _section(field.annotation) else "")
        inner = _section(field.annotation)
        if inner is None:
            yield Setting(key, _default(field), _meaning(field))
        elif inner in seen:
            yield Setting(key, _default(field), f"{field.description} [settings as of {seen[inner]}]")
        else:
            seen[inner] = key
            yield from _settings(inner, f"{key}.", seen)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, by itself or in a list."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default in (None, ()) else json.dumps(field.default, default=str)


def _meaning(field: FieldInfo) -> str:
    choices = [value for each in (field.annotation, *get_args(field.annotation)) for value in _choices(each)]
    return f"{field.description or ''} [{', '.join(map(str, choices))}]" if choices else field.description or ""


def _choices(annotation: Any) -> tuple:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def main(argv: list[str] | None = None) -> int:
    Parser(
        prog="python -m drafter.config", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    for key, default, meaning in settings():
        print(f"{key}: {default}\n    {meaning}")
    return 0
