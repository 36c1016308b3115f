"""Files that are either complete or absent: published by rename, journals, fingerprints."""

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from drafter.errors import ConfigError, ContractError

GIB = 2**30
PART = ".part"  # suffix of unpublished files; may be deleted while no process works in the folder
ASIDE = f".old{PART}"

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def fsync_dir(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to; on success make it durable and rename it to `path`.

    Works for a file and for a folder with its content. On failure nothing is left. An existing `path` is replaced
    in one step.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    path.parent.mkdir(parents=True, exist_ok=True)
    restore(path)
    try:
        yield part
        _make_durable(part)
        if part.is_dir() and path.is_dir():
            _set_aside_for(part, path)
        else:
            os.replace(part, path)
        fsync_dir(path.parent)
    finally:
        remove(part)
        if os.path.lexists(path):
            remove(_aside(path))


def _make_durable(path: Path) -> None:
    folders = [folder for folder, _, _ in os.walk(path)]
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    for folder in reversed(folders):
        fsync_dir(Path(folder))


def _set_aside_for(new: Path, old: Path) -> None:
    """Rename `new` to `old`: in one step, or where the file system cannot, in two that `restore` can undo."""
    aside = _aside(old)
    remove(aside)
    if _rename_exchange(new, old):
        new.rename(aside)
        return
    try:
        old.rename(aside)
        new.rename(old)
    except BaseException:
        restore(old)
        raise


def _rename_exchange(one: Path, other: Path) -> bool:
    """Swap two names. Returns False when the kernel, the C library or the file system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _aside(path: Path) -> Path:
    """The temporary name of a folder that is being replaced."""
    return path.with_name(f"{path.name}{ASIDE}")


def restore(path: Path) -> None:
    """Give a folder its name back if a replacement was killed between its two steps."""
    if not os.path.lexists(path) and os.path.lexists(aside := _aside(path)):
        aside.rename(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_file_system(folder: Path) -> None:
    """Sync the file system that holds `folder`: one call that makes many files durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs {folder}")
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    with publish(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    with publish(path) as part, open(part, "w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def read_note(path: Path, **needed: type) -> dict[str, Any]:
    """An optional JSON object: {} when the file is missing, invalid, or lacks a key of `needed` with its type."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in needed.items()):
            return found
    return {}


def sweep(folder: Path, below: bool = True) -> int:
    """Delete unpublished files of killed calls in `folder` (with `below`: anywhere in it). Returns their number.

    These are `*.part` and safetensors' `.tmp*`. A folder whose replacement was killed half-way gets its name back.
    Only for the process that holds the folder's lock.
    """
    find = folder.rglob if below else folder.glob
    for aside in list(find(f"*{ASIDE}")):
        restore(aside.with_name(aside.name.removesuffix(ASIDE)))
    left = [*find(f"*{PART}"), *find(".tmp*")]
    for path in left:
        remove(path)
    return len(left)


class Journal:
    """An append-only JSONL file that survives SIGKILL at any byte and a crash of the machine at any second.

    Opening truncates a torn last line, so that the next record does not continue it. A record is in the file when
    `append` returns, and durable at most `sync_seconds` later, even if nothing follows, and after `sync` and `close`.
    Records are ASCII-escaped, since a lone surrogate cannot be written as UTF-8.
    """

    def __init__(self, path: Path, sync_seconds: float = 1.0):
        """With infinite `sync_seconds` only `sync` and `close` make records durable."""
        self.path = path
        self.sync_seconds = sync_seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_tail(path)
        self._file = open(path, "ab")  # noqa: SIM115 - held open for the life of the journal
        self._closed = threading.Event()
        self._scheduled_by = 0  # process whose thread will sync the records so far; threads do not survive a fork
        self._failure: OSError | None = None

    def append(self, record: dict) -> None:
        """Raises the OSError of this write or of an earlier sync in the background."""
        self._raise_failure()
        self._file.write(json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n")
        self._file.flush()
        # After the flush: a thread that has not reset this yet will sync what was just written.
        if self._scheduled_by != os.getpid() and math.isfinite(self.sync_seconds):
            self._scheduled_by = os.getpid()
            own = os.dup(self._file.fileno())  # stays valid when the journal is closed meanwhile
            threading.Thread(target=self._sync_later, args=(own,), daemon=True).start()

    def sync(self) -> None:
        self._raise_failure()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._closed.set()
        try:
            self.sync()
        finally:
            self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def _sync_later(self, descriptor: int) -> None:
        try:
            if not self._closed.wait(self.sync_seconds):
                self._scheduled_by = 0  # before the sync: later records need another one
                os.fsync(descriptor)
        except OSError as error:
            self._failure = error
        finally:
            os.close(descriptor)

    def _raise_failure(self) -> None:
        if self._failure is not None:  # raised every time, since the kernel reports lost pages only once
            raise self._failure


def cut_torn_tail(path: Path) -> bool:
    """Truncate a file after its last line feed. Returns whether anything was cut."""
    if not path.exists():
        return False
    with open(path, "r+b") as file:
        end = position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
        return position < end


def read_jsonl(path: Path, *needed: str, journal: bool = False, **kinds: type) -> Iterator[dict]:
    """Records of a JSONL file, split only at line feeds (U+2028 is text).

    In a `journal` a torn last line is skipped: its writer was killed or is still writing. In a published file, which
    was complete when it got its name, it is damage. Raises ContractError on a line that is no JSON object, lacks a
    key of `needed`, or has a value of another type than `kinds` gives for its key.
    """
    return (record for _offset, record in read_placed(path, *needed, journal=journal, **kinds))


def read_placed(path: Path, *needed: str, journal: bool = False, **kinds: type) -> Iterator[tuple[int, dict]]:
    """As `read_jsonl`, with the offset of each record's line before the record."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            whole = line.endswith(b"\n")
            if not whole and not journal:
                raise ContractError(f"{path}: line {number} is broken: the file ends in the middle of it")
            if whole and line.strip():
                record = _parse(line)
                if not isinstance(record, dict) or not record.keys() >= set(needed):
                    raise ContractError(f"{path}: line {number} is broken")
                for key, kind in kinds.items():
                    if type(record.get(key)) is not kind:
                        raise ContractError(f"{path}: line {number}: {key!r} is not of type {kind.__name__}")
                yield offset, record
            offset += len(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def fingerprint_path(path: Path) -> str:
    """Fingerprint of a file or model folder, cheap for terabytes: names, sizes, first and last MiB of each file.

    Raises ConfigError when the path does not exist.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as handle:
            digest.update(handle.read(1 << 20))
            handle.seek(max(0, size - (1 << 20)))
            digest.update(handle.read(1 << 20))
    return digest.hexdigest()[:16]


def inode_id(folder: Path) -> str:
    """Device and inode of a folder: unchanged when it is moved, different for a copy."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user can still write on the file system of `path` (which need not exist yet)."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
