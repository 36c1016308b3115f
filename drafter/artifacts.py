"""Files that are either whole or absent: publish by rename, journals, fingerprints, locks."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from drafter.errors import ConfigError, ContractError

LOCK_SECONDS = 2.0  # a child that a killed process was just starting holds its lock until it runs its own program
GIB, TIB = 2**30, 2**40
CLAIMS = Path("/tmp")  # one for all users, whatever their TMPDIR
PART = ".part"  # suffix of bytes that are not published yet; safe to sweep when nothing is running


def fsync_dir(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; on success fsync it and rename it into place.

    Works for a file and for a folder (every file in it is synced). Nothing stays behind on failure, and
    an existing `path` is replaced only by complete bytes.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    old = path.with_name(f"{path.name}.old{PART}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        for file in [part] if part.is_file() else [p for p in part.rglob("*") if p.is_file()]:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if part.is_dir() and path.is_dir():  # it cannot be renamed over, and half of it must not keep the name
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        os.replace(part, path)
        fsync_dir(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def sync_file_system(folder: Path) -> None:
    """Make everything written so far on the file system that holds `folder` durable: one call for many files."""
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


def read_note(path: Path, **needed: type) -> dict[str, Any]:
    """A JSON object that the run can do without: {} where there is none, or not with the keys `needed`."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in needed.items()):
            return found
    return {}


def sweep(folder: Path) -> int:
    """Remove what crashes left unpublished below `folder` (`*.part`, safetensors' `.tmp*`); the number removed."""
    removed = 0
    for path in [*folder.rglob(f"*{PART}"), *folder.rglob(".tmp*")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed += 1
    return removed


class Journal:
    """An append-only JSONL file that survives SIGKILL at any byte and a crash of the machine at any second.

    Opening cuts a torn last line, so the next record never glues to it. A record is in the file when `append`
    returns, and durable at most `sync_seconds` later whether or not anything follows, and after `sync` and `close`.
    Records are ASCII-escaped, since a lone surrogate cannot be written as UTF-8.
    """

    def __init__(self, path: Path, sync_seconds: float = 1.0):
        """With `sync_seconds` infinite only `sync` and `close` make records durable."""
        self.path = path
        self.sync_seconds = sync_seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_tail(path)
        self._file = open(path, "ab")  # noqa: SIM115 - held open for the life of the journal
        self._closed = threading.Event()
        self._scheduled_by = 0  # the process in which a thread will sync what was written so far; threads do not fork
        self._failure: OSError | None = None

    def append(self, record: dict) -> None:
        """Raises the OSError of writing, or of an earlier sync in the background."""
        self._raise_failure()
        self._file.write(json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n")
        self._file.flush()
        # Only after the flush: a thread that has not cleared this yet will sync what was just written.
        if self._scheduled_by != os.getpid() and math.isfinite(self.sync_seconds):
            self._scheduled_by = os.getpid()
            own = os.dup(self._file.fileno())  # stays valid whatever closes the journal meanwhile
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
                self._scheduled_by = 0  # before the sync: what is appended from here on needs another one
                os.fsync(descriptor)
        except OSError as error:
            self._failure = error
        finally:
            os.close(descriptor)

    def _raise_failure(self) -> None:
        if self._failure is not None:  # for good: the kernel reports lost pages once
            raise self._failure


def cut_torn_tail(path: Path) -> bool:
    """Cut what follows the last line feed of a file; whether there was anything."""
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
    """Records of a JSONL file, split at line feeds alone (U+2028 is text).

    In a `journal` a torn last line is no record: its writer was killed, or is still writing. A published file was
    complete when it got its name, so there it is damage.
    Raises ContractError on a line that is no JSON object, lacks a key of `needed`, or has no value of the type that
    `kinds` gives for a key.
    """
    return (record for _offset, record in read_placed(path, *needed, journal=journal, **kinds))


def read_placed(path: Path, *needed: str, journal: bool = False, **kinds: type) -> Iterator[tuple[int, dict]]:
    """As `read_jsonl`, each record behind the offset of its line."""
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
    """Identity of a file or model folder by content, cheap for terabytes: names, sizes, first and last MiB.

    Raises ConfigError when nothing is there.
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


@contextlib.contextmanager
def locked(folder: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold `folder` for one process; the kernel drops the lock with the process, so it is never stale.

    Raises ConfigError when another process still holds it after `seconds`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        if not _flock(file.fileno(), seconds):
            raise ConfigError(f"another process is working in {folder}; wait for it or stop it")
        yield


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of `folder` at this moment. Changes nothing, and waits for nobody."""
    try:
        with open(folder / ".lock", "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


@contextlib.contextmanager
def claimed(name: str, owner: str) -> Iterator[None]:
    """Hold a name of this machine, against every user's processes, as `locked` holds a folder.

    Raises ConfigError naming the owner that holds it, or what stands where its file belongs.
    """
    path = CLAIMS / f"drafter-{name}.lock"
    try:
        file = _open_shared(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; {name} is claimed with this file: remove what is there"
        ) from None
    try:
        found = os.fstat(file)
        # Anybody can put something there: what is written must not end up in another file.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ConfigError(f"{path} is no plain file; {name} is claimed with it: remove what is there")
        if not _flock(file):
            holder = os.pread(file, 4096, 0).decode(errors="replace")
            holder = "".join(filter(str.isprintable, holder)) or "another process"
            raise ConfigError(f"{name} is in use by {holder}; wait for it or stop it")
        os.truncate(file, 0)
        os.pwrite(file, owner.encode(errors="replace"), 0)
        yield
    finally:
        os.close(file)


def _open_shared(path: Path) -> int:
    """A file in a folder like /tmp that every user can open, made where there is none; no link is followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    # Without O_CREAT first: the kernel may refuse that for a file of another user.
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    with contextlib.suppress(FileExistsError):  # made by another process since
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(file, 0o666)  # whatever the umask, the next user is to be able to claim it
        return file
    return os.open(path, flags)


def _flock(file: int, seconds: float = LOCK_SECONDS) -> bool:
    """Whether the lock came within `seconds`."""
    patience = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > patience:
                return False
            time.sleep(0.05)


def home(folder: Path) -> str:
    """Identity of a folder: it stays when the folder is moved, and a copy has another."""
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def span(seconds: float) -> str:
    """A time as a person reads it, whole minutes only where there are some."""
    return f"{round(seconds, 1):g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user can still write on the file system that holds `path` (which need not exist yet)."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def size(count: float) -> str:
    """Bytes as a person reads them."""
    if count >= 0.1 * TIB:
        return f"{count / TIB:.2f} TiB"
    return f"{count / GIB:.2f} GiB"


if __name__ == "__main__":
    from drafter.disk import main  # what may go depends on configs and manifests, which stand above this module

    raise SystemExit(main())
