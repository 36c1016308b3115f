"""Locks on folders: one process works in a folder, or several read it. The kernel drops a lock with its process.

The lock is flock(2) on the folder's `.lock`, in which the process that works there says who it is.
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

LOCK_SECONDS = 2.0  # a child that a killed process was just starting holds its lock until it runs its own program
CLAIMS = Path("/tmp")  # one for all users, whatever their TMPDIR
LOCK = ".lock"
SHARES = ".shares"  # a folder that several processes divide among them has a lock for each share in here
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def locked(folder: Path, who: str = "", reads: Iterable[Path] = (), seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Work in `folder`, made where there is none, as the only process; `who` and what it reads are for others to see.

    Raises ConfigError when after `seconds` another process still works in it or reads it, or the file system has no
    locks.
    """
    descriptor = None
    while descriptor is None:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed since
            descriptor = open_locked(folder / LOCK, fcntl.LOCK_EX, seconds)
            if descriptor is None:
                raise _busy(folder)
    try:
        record = {"who": who, "reads": [str(each.resolve()) for each in reads], "host": socket.gethostname()}
        record |= process.identity(os.getpid())
        try:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(record).encode(), 0)
        except OSError as error:  # a full disk must not keep `clean` from freeing it
            if error.errno not in DISK_FULL:
                raise
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reading(folder: Path, theirs: bool = False) -> Iterator[None]:
    """Keep `folder` as it is while the block lasts: nobody works in it or removes it, others may read it too.

    Without a lock is read what does not exist, what this user may not write to, and of `theirs`, where nothing may be
    written, a folder without a lock file.
    Raises ConfigError when a process works in it, or the file system has no locks.
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
    """A descriptor of the file at `path` that holds its lock; None when after `seconds` another has it.

    A file that was removed between opening and locking protects nothing, so it is opened again.
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
    """Whether a process works in `folder`, or with `readers` also reads it, throughout `patience` seconds.

    Changes nothing. Raises ConfigError where the file system has no locks.
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
    """The shares of a divided folder in which processes work."""
    return [share for share in sorted(folder.glob(f"{SHARES}/*")) if in_use(share)]


def holder(folder: Path) -> dict:
    """What the process that works in `folder`, or was the last to, said of itself; {} where nothing is known."""
    try:
        found = json.loads((folder / LOCK).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe(folder: Path) -> str:
    """Who works in `folder`, for a message; empty where that is not known."""
    found = holder(folder)
    if not found.get("pid"):
        return ""
    who = f"{found['who']}, " if found.get("who") else ""
    return f" ({who}process {found['pid']} on {found.get('host')})"


def is_ancestor(record: dict) -> bool:
    """Whether the process of a `holder` is this one, or started it."""
    family = [os.getpid(), *(parent.pid for parent in psutil.Process().parents())]
    return process.lives(record) and record["pid"] in family


def fault(folder: Path) -> str | None:
    """Why nothing below `folder` (which need not exist yet) can be locked, or None. No name is left behind."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _flock(file.fileno(), folder, fcntl.LOCK_SH, 0)
    except ConfigError as error:
        return str(error)
    except OSError:  # a folder that cannot be written to is for others to report
        return None
    return None


@contextlib.contextmanager
def claimed(name: str, owner: str) -> Iterator[None]:
    """Hold a name of this machine, against every user's processes, as `locked` holds a folder.

    Raises ConfigError naming the owner that holds it, or what lies where its file belongs.
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


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _open(path: Path, create: bool, must_write: bool) -> int:
    """For writing where that is allowed: NFS gives exclusive locks to writers alone."""
    try:
        return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        if must_write or error.errno not in READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY)


def _flock(descriptor: int, path: Path, kind: int, seconds: float) -> bool:
    """Whether the lock came within `seconds`. Raises ConfigError where the file system has none."""
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
