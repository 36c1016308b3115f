"""Locks on folders: one process works in a folder, or several read it. The kernel releases a lock with its process.

The lock is flock(2) on the folder's file `.lock`, in which the process that works there records its identity.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from drafter import process
from drafter.errors import ConfigError

LOCK_SECONDS = 2.0  # a forked child of a killed process keeps its lock until exec; retry for this long
CLAIMS = Path("/tmp")  # the same for all users, whatever TMPDIR says
LOCK = ".lock"
SHARES = ".shares"  # holds one lock folder for each share of a folder that several processes work in
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def locked(folder: Path, who: str = "", reads: Iterable[Path] = (), seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Work in `folder` as the only process; the folder is created if needed.

    `who` and the folders that it `reads` are recorded for other processes' messages. Raises ConfigError when after
    `seconds` another process still works in the folder or reads it, and when the file system has no locks.
    """
    descriptor = None
    while descriptor is None:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
            descriptor = open_locked(folder / LOCK, fcntl.LOCK_EX, seconds)
            if descriptor is None:
                raise _busy(folder)
    try:
        record = {"who": who, "reads": [str(each.resolve()) for each in reads], "host": socket.gethostname()}
        record |= process.identity(os.getpid())
        try:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(record).encode(), 0)
        except OSError as error:  # on a full disk `clean` must still work
            if error.errno not in DISK_FULL:
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(folder: Path, theirs: bool = False) -> Iterator[None]:
    """Keep `folder` unchanged during the block: no process may work in it or remove it, others may read it.

    No lock is taken on a folder that does not exist or that this user may not write to, nor on one of `theirs` (in
    which nothing may be created) without a lock file. Raises ConfigError when a process works in the folder or the
    file system has no locks.
    """
    descriptor = None
    try:
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_locked(folder / LOCK, fcntl.LOCK_SH, create=not theirs)
            if descriptor is None:
                raise _busy(folder)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
    try:
        for share in folder.glob(f"{SHARES}/*"):
            if in_use(share, LOCK_SECONDS):
                raise _busy(share)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def open_locked(
    path: Path, kind: int = fcntl.LOCK_EX, seconds: float = LOCK_SECONDS, create: bool = True
) -> int | None:
    """A descriptor that holds the lock of the file at `path`; None when another process still has it after `seconds`.

    A file that is removed between opening and locking protects nothing, so it is opened again.
    """
    while True:
        descriptor = _open(path, create, must_write=kind == fcntl.LOCK_EX)
        try:
            if not _flock(descriptor, path, kind, seconds):
                os.close(descriptor)
                return None
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def in_use(folder: Path, patience: float = 0, readers: bool = False) -> bool:
    """Whether a process works in `folder` (with `readers`: or reads it) during all of `patience` seconds.

    Changes nothing. Raises ConfigError when the file system has no locks.
    """
    try:
        descriptor = _open(folder / LOCK, create=False, must_write=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _flock(descriptor, folder / LOCK, fcntl.LOCK_EX if readers else fcntl.LOCK_SH, patience)
    finally:
        os.close(descriptor)


def shares_in_use(folder: Path) -> list[Path]:
    """The shares of `folder` in which processes work."""
    return [share for share in sorted(folder.glob(f"{SHARES}/*")) if in_use(share)]


def holder(folder: Path) -> dict:
    """The record of the process that works in `folder`, or was the last to do so; {} without one."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(folder: Path) -> str:
    """The process that works in `folder`, for a message; empty when it is unknown."""
    found = holder(folder)
    if not found.get("pid"):
        return ""
    who = f"{found['who']}, " if found.get("who") else ""
    return f" ({who}process {found['pid']} on {found.get('host')})"


def is_ancestor(record: dict) -> bool:
    """Whether the process in a `holder` record is this one or an ancestor of it."""
    family = [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
    return process.lives(record) and record["pid"] in family


def fault(folder: Path) -> str | None:
    """Why folders below `folder` (which need not exist yet) cannot be locked, or None. Leaves no file."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _flock(file.fileno(), folder, fcntl.LOCK_SH, 0)
    except ConfigError as error:
        return str(error)
    except OSError:  # another check reports a folder that cannot be written to
        return None
    return None


@contextlib.contextmanager
def claimed(name: str, owner: str) -> Iterator[None]:
    """Hold a name on this machine against the processes of all users, as `locked` holds a folder.

    Raises ConfigError naming the owner that holds it, or the file that is in the lock file's place.
    """
    path = CLAIMS / f"drafter-{name}.lock"
    try:
        file = _open_shared(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; this is the lock file of {name}: remove it") from None
    try:
        found = os.fstat(file)
        # Any user can put a link there: never write through it into another file.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ConfigError(f"{path} is not a plain file, but this is the lock file of {name}: remove it")
        if not _flock(file, path, fcntl.LOCK_EX, LOCK_SECONDS):
            holder = os.pread(file, 4096, 0).decode(errors="replace")
            holder = "".join(filter(str.isprintable, holder)) or "another process"
            raise ConfigError(f"{name} is in use by {holder}; wait for it or stop it")
        os.truncate(file, 0)
        os.pwrite(file, owner.encode(errors="replace"), 0)
        yield
    finally:
        os.close(file)


def _open_shared(path: Path) -> int:
    """Open or create a file that every user can open, in a folder like /tmp; links are not followed."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    # First without O_CREAT, which the kernel may refuse for a file of another user.
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, flags)
    with contextlib.suppress(FileExistsError):  # created by another process meanwhile
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(file, 0o666)  # whatever the umask: the next user must be able to open it
        return file
    return os.open(path, flags)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _open(path: Path, create: bool, must_write: bool) -> int:
    """Open for writing if possible, since NFS gives exclusive locks only to writers."""
    try:
        return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        if must_write or error.errno not in READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY)


def _flock(descriptor: int, path: Path, kind: int, seconds: float) -> bool:
    """Whether the lock was granted within `seconds`. Raises ConfigError when the file system has no locks."""
    patience = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > patience:
                return False
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise ConfigError(
                f"the file system of {path.parent if path.name == LOCK else path} has no locks ({error.strerror}): "
                "mount it with locks, or set run.dir to a folder on another one"
            ) from None


def _busy(folder: Path) -> ConfigError:
    if in_use(folder):
        return ConfigError(f"another process is working in {folder}{describe(folder)}; wait for it or stop it")
    return ConfigError(f"another process is reading {folder}; wait for it or stop it")
