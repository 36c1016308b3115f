"""JSON from a file, validated against a type. An error is one line that names the field and what it must be."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import GenericAlias
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

from drafter import files
from drafter.errors import ContractError, StageError

CHECKSUM = "xxh3"  # key of a sealed file: checksum of its other keys
OPEN = with_config(ConfigDict(strict=True, extra="allow"))  # unlisted fields are kept as they are
LISTED = with_config(ConfigDict(strict=True, extra="ignore"))  # unlisted fields are left out
CLOSED = with_config(ConfigDict(strict=True, extra="forbid"))  # unlisted fields are refused


def validate(kind: Any, value: Any) -> Any:
    """`value`, if it is of the type `kind`. Raises ContractError (`field: what it must be`)."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ContractError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def load(path: Path, kind: Any, error: type[StageError] = ContractError, remedy: str = "") -> Any:
    """The JSON file at `path`, of the type `kind`; of a sealed file, the content without its checksum.

    Raises FileNotFoundError, or `error` with the file, the field and the remedy.
    """
    try:
        return validate(kind, _unsealed(_parse(path.read_bytes())))
    except ContractError as why:
        raise error(f"{path} is broken ({why})" + (f"; {remedy}" if remedy else "")) from None


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with a checksum, which `load` compares."""
    return content | {CHECKSUM: checksum(content)}


def checksum(content: dict[str, Any]) -> str:
    """XXH3 of canonical JSON, after a round trip through JSON that turns tuples into lists and keys into strings."""
    again = json.loads(json.dumps(content))
    return xxhash.xxh3_64(json.dumps(again, sort_keys=True).encode()).hexdigest()


def read_or_empty(path: Path, kind: Any) -> dict[str, Any]:
    """As `load`, but {} when the file is missing or invalid: for optional files."""
    try:
        return load(path, kind)
    except (FileNotFoundError, NotADirectoryError, ContractError):
        return {}


def lines(path: Path, kind: Any, remedy: str = "", journal: bool = False) -> Iterator[Any]:
    """The records of a JSONL file. Raises FileNotFoundError, or ContractError with the file, record and field."""
    for number, record in enumerate(files.read_jsonl(path, journal=journal), 1):
        try:
            yield validate(kind, record)
        except ContractError as why:
            raise ContractError(f"{path}: record {number}: {why}" + (f"; {remedy}" if remedy else "")) from None


def records_or_empty(path: Path, kind: Any, limit: int | None = None) -> list[dict]:
    """At most `limit` records of a JSONL file; [] when it is missing or invalid: for optional files."""
    try:
        return list(islice(lines(path, kind, journal=True), limit))
    except (OSError, ContractError):
        return []


@cache
def record_of(cls: type) -> Any:
    """The type of the records that `cls`, a dataclass, is made from; fields with a default may be missing."""
    hints = {name: _nested(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
    optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    made: Any = TypedDict  # called with computed fields, which is no declaration to a type checker
    return CLOSED(made(cls.__name__, {n: NotRequired[t] if n in optional else t for n, t in hints.items()}))


def _nested(hint: Any) -> Any:
    """`hint` with dataclasses, also in lists, replaced by their record types."""
    if get_origin(hint) is list:
        return GenericAlias(list, (_nested(get_args(hint)[0]),))
    return record_of(hint) if isinstance(hint, type) and is_dataclass(hint) else hint


def _unsealed(content: Any) -> Any:
    """Content without a checksum is of an earlier version, or of a file that has none."""
    if not isinstance(content, dict) or CHECKSUM not in content:
        return content
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if content[CHECKSUM] != checksum(rest):
        raise ContractError("it does not match its checksum")
    return rest


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as why:
        raise ContractError(f"no JSON: {why}" if isinstance(why, ValueError) else "nested too deeply") from None


_adapter = cache(TypeAdapter)
