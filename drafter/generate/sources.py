"""Prompt sources: files, folders and hub data sets, read record by record; `count` draws some of them by content."""

import hashlib
import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from drafter import contracts
from drafter.config import Source
from drafter.errors import ConfigError, ResumableError
from drafter.generate import record_files

Placed = tuple[str, Any]  # a record's file and line, for messages, and the record

SUFFIXES = re.compile(r"\.(jsonl|ndjson|json|parquet)(\.(gz|bz2|xz|zst))?$")
NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")  # train-00000-of-00005.parquet, as the hub names files
SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
BATCH = 1024  # records


def read_source(source: Source) -> Iterator[Placed]:
    """The source's records; a line that is not JSON is a BrokenLine, which the caller rejects.

    Raises ConfigError for a source that is missing or cannot be read, ResumableError when the hub does not answer.
    """
    if source.hub:
        return _read_hub(source)
    if _is_saved(_there(source)):
        return _read_saved(source)
    return (placed for path in files_of(source) for placed in record_files.read_records(path))


def _there(source: Source) -> Path:
    path = _local(source)
    if not path.exists():
        raise ConfigError(f"prompts {source.name}: {path} does not exist")
    return path


def _local(source: Source) -> Path:
    """The path of a source that is not on the hub; the config requires one."""
    assert source.path is not None
    return source.path


def files_of(source: Source) -> list[Path]:
    """A local source's files: the file itself, or a folder's data files of `source.split`.

    Files belong to a split if they are named as on the hub: `train-00000-of-00002.parquet`, `train.jsonl`,
    `train/a.jsonl`. If none does, all are read. Raises ConfigError.
    """
    path = _there(source)
    found: dict[str | None, list[Path]] = {}
    for file in _data_files(path):
        found.setdefault(_split_of(file.relative_to(path)), []).append(file)
    wanted = SPLITS.get(source.split, source.split)
    if wanted in found or not found.keys() - {None}:
        return found.get(wanted, found.get(None, []))
    splits = ", ".join(sorted(split or "no split" for split in found))
    raise ConfigError(
        f"prompts {source.name}: {path} has no file of split {source.split}, only of {splits}; set the source's "
        "`split`, or set `path` to one file"
    )


def _data_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [
        file
        for file in sorted(path.rglob("*"))
        if SUFFIXES.search(file.name)
        and file.name not in NO_DATA
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    ]


def _split_of(path: Path) -> str | None:
    """The split that a file's name tells. `path` is relative to the source; empty if the source is a file."""
    if shard := SHARD.match(path.name):
        return SPLITS.get(shard[1], shard[1])
    words = [path.name.partition(".")[0], *reversed(path.parts[:-1])]
    return next((SPLITS[word.lower()] for word in words if word.lower() in SPLITS), None)


def source_text(source: Source) -> str:
    """A source's place and form, for messages. Raises ConfigError."""
    if source.hub:
        return f"{source.hub}, split {source.split}"
    if _is_saved(_there(source)):
        return f"{source.path} (saved by `datasets`)"
    files, all_files = files_of(source), len(_data_files(_local(source)))
    form = f" ({record_files.file_form(files[0])})" if files else ""
    if files == [source.path]:
        return f"{source.path}{form}"
    chosen = (
        f"{len(files)} of {all_files} files, split {source.split}" if len(files) < all_files else f"{all_files} files"
    )
    return f"{source.path}, {chosen}{form}"


def file_states(source: Source) -> list:
    """Names, sizes and times of a local source's files; if they change, the source is read again."""
    if source.hub:
        return []
    folder = _there(source)
    saved = _is_saved(folder)
    files = sorted(p for p in folder.rglob("*") if p.is_file()) if saved else files_of(source)
    found = [(file, file.stat()) for file in files]
    return [[str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns] for file, stat in found]


def count_records(source: Source) -> int | None:
    """Number of records in a local source, unusable ones included; None for the hub or a missing path."""
    if not source.path or not source.path.exists():
        return None
    return _count(str(source.path), source.split, str(file_states(source)))


@lru_cache(maxsize=64)
def _count(path: str, split: str, _state: str) -> int:
    source = Source(name="counted", path=path, split=split)
    if _is_saved(_local(source)):
        with record_files.one_line_errors(_local(source)):
            return len(_load_saved(source))
    return sum(map(record_files.count_records, files_of(source)))


# ---- data sets


def _is_saved(path: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


def _load_saved(source: Source) -> Any:
    import datasets  # takes 2 s

    loaded = datasets.load_from_disk(str(source.path))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if source.split not in loaded:
        splits = ", ".join(loaded)
        raise ConfigError(f"prompts {source.name}: {source.path} has no split {source.split}, only {splits}")
    return loaded[source.split]


def _read_saved(source: Source) -> Iterator[Placed]:
    with record_files.one_line_errors(_local(source)):
        loaded = _load_saved(source).with_format("arrow")
        records = (record for batch in loaded.iter(BATCH) for record in batch.to_pylist())
        for number, record in enumerate(records, 1):
            yield f"{source.path} row {number}", record_files.without_nulls(record)


def _read_hub(source: Source) -> Iterator[Placed]:
    import datasets

    try:
        records = datasets.load_dataset(source.hub, revision=source.revision, split=source.split)
        for number, record in enumerate(records, 1):
            yield f"{source.hub} row {number}", record_files.without_nulls(record)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(f"prompts {source.name}: {error}") from None
    except (OSError, TimeoutError) as error:  # the hub client's network errors are OSErrors
        copy = "to do without the hub, set the source's `path` to a copy"
        if datasets.config.HF_HUB_OFFLINE:
            raise ResumableError(
                f"prompts {source.name}: {source.hub} is not on this machine yet; 01b fetches it; {copy}"
            ) from None
        raise ResumableError(f"prompts {source.name}: {source.hub} cannot be read now ({error}); {copy}") from None


# ---- the draw


def draw(source: Source, seed: int) -> Iterator[Placed]:
    """The `source.count` records with the smallest hashes under `seed`, or all of them.

    Reads the source twice if `count` is set. Raises ConfigError when its files change meanwhile.
    """
    before = file_states(source)
    yield from read_source(source) if source.count is None else _smallest(source, source.count, seed)
    if file_states(source) != before:
        raise _changed(source)


def _smallest(source: Source, count: int, seed: int) -> Iterator[Placed]:
    keys = array("Q", (shuffle_key(seed, contracts.content_id(record)) for _, record in read_source(source)))
    limit = sorted(keys)[count - 1] if count < len(keys) else 2**64
    ties = count - sum(key < limit for key in keys)  # equal records have equal keys
    for key, placed in zip_longest(keys, read_source(source)):
        if key is None or placed is None:
            raise _changed(source)
        if key < limit:
            yield placed
        elif key == limit and ties > 0:
            ties -= 1
            yield placed


def _changed(source: Source) -> ConfigError:
    return ConfigError(
        f"prompts {source.name}: {source.path or source.hub} changed while it was read; wait until it is complete, "
        "then run the same command again"
    )


def shuffle_key(seed: int, identity: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:8], "big")
