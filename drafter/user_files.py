"""Files that a user names: only regular files are opened, and their size is bounded when they are read as a whole.

A named pipe would block forever and /dev/zero would fill the memory.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from drafter import text
from drafter.errors import ConfigError

CONFIG_BYTES = 16 * 10**6  # far above any config; a data file given by mistake is larger

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links are followed.

    Raises ConfigError for a folder, pipe, socket or device, FileNotFoundError and other OSErrors as `open` does.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe must not block
    except OSError:
        if stat.S_ISSOCK(_mode(path)):
            raise ConfigError(f"{path} is a socket, not a regular file") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    kind = next((name for is_kind, name in KINDS if is_kind(mode)), "no file")
    raise ConfigError(f"{path} is {kind}, not a regular file")


def read_text(path: Path, most: int = CONFIG_BYTES) -> str:
    """The content of a regular UTF-8 file of at most `most` bytes.

    Raises ConfigError for a larger one and as `open_regular` does, UnicodeDecodeError, OSError.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(f"{path} has more than {text.size(most)}: this is probably the wrong file")
    return content.decode("utf-8")


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0
